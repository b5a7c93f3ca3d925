"""Shapes are the published ones, and the work fits the KV cache."""

import math

import pytest

from benchmarks.compare_torch.gpu_sizes import (
    FULL,
    MODEL_CONFIGS,
    REHEARSAL,
    throughput_workload,
    write_config,
)
from models import read_model_config


def num_weights(config: dict) -> int:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    layer = 2 * hidden * q_width + 2 * hidden * kv_width + 3 * hidden * inner + 2 * hidden
    if config["model_type"] == "qwen3":
        layer += 2 * config["head_dim"]
    num_tables = 1 if config["tie_word_embeddings"] else 2
    return config["num_hidden_layers"] * layer + num_tables * config["vocab_size"] * hidden + hidden


@pytest.mark.parametrize(
    ("model", "published"), [("qwen3-0.6b", 596_049_920), ("llama-3.1-8b", 8_030_261_248)]
)
def test_shapes_have_as_many_weights_as_the_published_models(model, published, tmp_path) -> None:
    assert num_weights(MODEL_CONFIGS[model]) == published
    for is_rehearsal in (False, True):
        config = write_config(tmp_path, model, is_rehearsal=is_rehearsal)
        assert read_model_config(tmp_path).num_layers == config["num_hidden_layers"]


@pytest.mark.parametrize("sizes", [FULL, REHEARSAL], ids=["full", "rehearsal"])
def test_work_fits_the_cache_and_the_longest_request(sizes) -> None:
    block_size = sizes.block_size or 16
    decode_len = sizes.decode_prompt + sizes.num_decode_tokens
    workload = throughput_workload(sizes, vocab_size=256, seed=0)
    longest = max(decode_len, workload.max_request_tokens, *sizes.first_token_prompts)
    assert longest <= sizes.max_model_len
    num_blocks = sizes.num_cache_tokens // block_size
    assert max(sizes.decode_batches) * math.ceil(decode_len / block_size) <= num_blocks
    lengths = sorted(request.num_tokens for request in workload.requests)[-sizes.max_num_seqs :]
    assert sum(math.ceil(length / block_size) for length in lengths) <= num_blocks
