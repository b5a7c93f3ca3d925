"""The serving golden numbers agree with the dense NumPy oracle, and with no wrong config."""

import json

import numpy as np
import pytest

from tests.oracles.dense_model import dense_logits
from tests.oracles.serving_golden import (
    NUM_NEW_TOKENS,
    SERVING_RECIPES,
    load_serving_golden,
    write_serving_recipe,
)


def relative_difference(folder, golden) -> float:
    """Of the dense model's logits, where new tokens were drawn, as a share of the largest."""
    logits = dense_logits(folder, golden.prompt + golden.new_tokens[:-1])[-NUM_NEW_TOKENS:]
    return float(np.abs(logits - golden.logits).max() / np.abs(golden.logits).max())


@pytest.mark.parametrize("recipe", list(SERVING_RECIPES))
def test_dense_model_equals_serving_golden_numbers(recipe, tmp_path):
    folder = write_serving_recipe(tmp_path, recipe)
    for golden in load_serving_golden(recipe):
        assert relative_difference(folder, golden) <= 1e-5


@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        ("gemma3", {"sliding_window": 512}),
        ("gemma3", {"sliding_window": 15}),
        ("gemma3", {"sliding_window": 17}),
        ("gemma3", {"rope_local_base_freq": 1e6}),
        ("gemma3", {"rope_scaling": None}),
        ("gemma3", {"query_pre_attn_scalar": 16}),
        ("mistral_window", {"sliding_window": None}),
        ("mistral_window", {"sliding_window": 20}),
        ("mistral_window", {"sliding_window": 22}),
        ("qwen2_window", {"use_sliding_window": False}),
        ("qwen2_window", {"max_window_layers": 1}),
        ("gemma2", {"sliding_window": 512}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
    ],
    ids=str,
)
def test_serving_golden_numbers_pin_each_fact_of_the_config(recipe, wrong, tmp_path):
    folder = write_serving_recipe(tmp_path, recipe)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    difference = relative_difference(folder, load_serving_golden(recipe)[0])
    # A hundred times what the serving tests allow.
    assert difference > 100 * 1e-4
