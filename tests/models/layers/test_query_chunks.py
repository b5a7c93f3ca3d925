"""Latent attention in chunks of rows gives the same numbers with less temporary memory."""

import dataclasses
import json

import numpy as np
import pytest

from models.layers import latent_attention, query_chunks
from models.layers.query_chunks import chunk_rows
from tests.models.random_weights import load_random_model
from tests.models.steppers import IN_TURN, in_loop
from tests.oracles.paged_stepper import PagedStepper

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
INDEX = {"index_topk": 5, "index_head_dim": 8, "index_n_heads": 4}
FAR = {
    **{"type": "yarn", "rope_theta": 500.0, "factor": 8.0, "llama_4_scaling_beta": 0.5},
    **{"original_max_position_embeddings": 8, "mscale_all_dim": 0.5},
}
FIELDS = {
    "DeepseekV3ForCausalLM": {},
    "Mistral4ForCausalLM": {"rope_parameters": FAR},  # queries have factors by their positions
    "DeepseekV32ForCausalLM": INDEX,
    "MistralLarge4ForCausalLM": INDEX,  # as Mistral 4, and the factors differ by head
}
NUMBERS_PER_ROW = 4 * (24 + 8)


def test_chunks_are_alike_and_fit():
    assert chunk_rows(query_chunks.MAX_NUMBERS // 96, 96) is None
    # DeepSeek V3 on one device, and on each of four.
    assert chunk_rows(8192, 128 * 576) == 256
    assert chunk_rows(8192, 32 * 576) == 1024
    for num_rows, numbers_per_row in (
        (8191, 128 * 576),
        (5000, 64 * 576),
        (600, 2**24),
        (3, 2**26),
    ):
        size = chunk_rows(num_rows, numbers_per_row)
        assert size * numbers_per_row <= max(query_chunks.MAX_NUMBERS, numbers_per_row)
        assert -num_rows % size < -(-num_rows // size)


# Row -> tokens of each step. Chunks of 5 rows end within prompts, and at their ends.
STEPS = (
    {0: list(range(1, 14)), 1: list(range(20, 27)), 2: list(range(30, 37))},
    {0: [14], 1: list(range(5, 32)), 2: [3]},
    {0: [7], 1: [8], 2: list(range(40, 56))},
)


def recorded(sizes):
    """`map_query_chunks`, whose sizes of chunks are added to the list."""

    def run(*args, size):
        sizes.append(size)
        return query_chunks.map_query_chunks(*args, size=size)

    return run


def all_logits(model, **options):
    stepper = PagedStepper(model, num_tokens=37, **options)
    return [logits for chunks in STEPS for logits in stepper.step(chunks).values()]


@pytest.mark.parametrize(
    ("architecture", "makes_loop", "only_last_tokens"),
    [
        ("DeepseekV3ForCausalLM", False, False),
        ("MistralLarge4ForCausalLM", False, False),
        pytest.param("MistralLarge4ForCausalLM", True, True, marks=pytest.mark.slow),
        pytest.param("Mistral4ForCausalLM", False, True, marks=pytest.mark.slow),
        pytest.param("DeepseekV32ForCausalLM", True, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_compute_what_all_rows_at_once_do(
    tmp_path, monkeypatch, architecture, makes_loop, only_last_tokens
):
    config = {"architectures": [architecture], **SIZES, **FIELDS[architecture]}
    # A last layer of fewer tokens has no chunks, so there must be a layer before it.
    if not makes_loop and not only_last_tokens:
        config["num_hidden_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_random_model(tmp_path)
    model = in_loop(model) if makes_loop else dataclasses.replace(model, platform=IN_TURN)
    wanted = all_logits(model, only_last_tokens=only_last_tokens)
    calls = []
    monkeypatch.setattr(query_chunks, "MAX_NUMBERS", 6 * NUMBERS_PER_ROW)
    monkeypatch.setattr(latent_attention, "map_query_chunks", recorded(calls))
    got = all_logits(model, only_last_tokens=only_last_tokens)
    assert set(calls) == {4}
    for of_chunks, at_once in zip(got, wanted, strict=True):
        assert np.abs(at_once).max() > 0.01
        np.testing.assert_allclose(of_chunks, at_once, atol=2e-6, rtol=2e-5)
