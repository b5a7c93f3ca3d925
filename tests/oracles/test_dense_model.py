"""The dense NumPy oracle agrees with the golden numbers of transformers."""

import json

import numpy as np
import pytest

from tests.oracles.dense_model import dense_logits
from tests.oracles.golden import load_golden
from tests.oracles.recipes import RECIPES, write_recipe

# A hundred times what the decoder's tests allow, as a share of the largest logit.
SEEN_AT_ONCE = 100 * 1e-4


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_dense_model_equals_golden_numbers(recipe, tmp_path):
    folder = write_recipe(tmp_path, recipe)
    for sequence in load_golden(recipe):
        logits = dense_logits(folder, sequence.prompt + sequence.new_tokens[:-1])
        difference = np.abs(logits[sequence.positions] - sequence.logits).max()
        assert difference <= 1e-5 * np.abs(logits).max()


@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        ("mistral_window", {"sliding_window": None}),
        ("mistral_window", {"sliding_window": 10}),
        ("mistral_window", {"sliding_window": 12}),
        ("qwen2_window", {"use_sliding_window": False}),
        ("qwen2_window", {"max_window_layers": 0}),
        ("qwen3_layer_types", {"sliding_window": 11}),
        ("gemma2", {"sliding_window": 512}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"hidden_act": "silu"}),
        ("gemma3", {"sliding_window": 512}),
        ("gemma3", {"sliding_window": 7}),
        ("gemma3", {"sliding_window_pattern": 5}),
        ("gemma3", {"query_pre_attn_scalar": 16}),
        ("gemma3", {"rope_local_base_freq": 1e6}),
        ("gemma3", {"rope_theta": 1e4}),
        ("gemma3", {"rope_scaling": None}),
        ("gemma3_rope_parameters", {"final_logit_softcapping": None}),
    ],
    ids=str,
)
def test_golden_numbers_pin_each_fact_of_the_config(recipe, wrong, tmp_path):
    """The same weights under a config that is wrong in one field are far from the golden logits."""
    folder = write_recipe(tmp_path, recipe)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    sequence = load_golden(recipe)[-1]
    logits = dense_logits(folder, sequence.prompt + sequence.new_tokens[:-1])
    difference = np.abs(logits[sequence.positions] - sequence.logits).max()
    assert difference > SEEN_AT_ONCE * np.abs(sequence.logits).max()
