"""The shapes are the published ones, and the work fits what is reserved for it."""

import math

import pytest

from benchmarks.gpu.sizes import (
    FULL,
    LLAMA_3_1_8B,
    MODEL_CONFIGS,
    QWEN3_0_6B,
    REHEARSAL,
    prefix_workload,
    throughput_workload,
    write_config,
)
from models import read_model_config


def num_weights(config) -> int:
    """By the layers' definition, norms and all."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    layer = 2 * hidden * q_width + 2 * hidden * kv_width + 3 * hidden * inner + 2 * hidden
    if config["model_type"] == "qwen3":
        layer += 2 * config["head_dim"]
    num_tables = 1 if config["tie_word_embeddings"] else 2
    tables = num_tables * config["vocab_size"] * hidden
    return config["num_hidden_layers"] * layer + tables + hidden


@pytest.mark.parametrize(
    ("model", "published"), [(QWEN3_0_6B, 596_049_920), (LLAMA_3_1_8B, 8_030_261_248)]
)
def test_shapes_have_as_many_weights_as_the_published_models(model, published):
    assert num_weights(MODEL_CONFIGS[model]) == published


@pytest.mark.parametrize("is_rehearsal", [False, True])
@pytest.mark.parametrize("model", MODEL_CONFIGS)
def test_config_is_one_that_models_can_read(model, is_rehearsal, tmp_path):
    config = write_config(tmp_path, model, is_rehearsal=is_rehearsal)
    read = read_model_config(tmp_path)
    assert read.num_layers == config["num_hidden_layers"]
    assert read.tie_word_embeddings == (model == QWEN3_0_6B)
    assert read.max_position_embeddings >= FULL.max_model_len


@pytest.mark.parametrize("sizes", [FULL, REHEARSAL], ids=["full", "rehearsal"])
def test_everything_fits_the_cache_and_the_longest_request(sizes):
    block_size = sizes.block_size or 16

    def num_blocks(num_tokens: int) -> int:
        return math.ceil(num_tokens / block_size)

    decode_len = sizes.decode_prompt + sizes.num_decode_steps + 2
    throughput = throughput_workload(sizes, vocab_size=256, seed=0)
    prefix = prefix_workload(sizes, vocab_size=256, seed=0)
    longest = max(decode_len, throughput.max_request_tokens, prefix.max_request_tokens)
    assert max(longest, *sizes.ttft_prompts) <= sizes.max_model_len
    assert max(sizes.ttft_prompts) <= sizes.max_num_batched_tokens  # a single step
    num_cache_blocks = sizes.num_cache_tokens // block_size
    assert max(sizes.decode_batches) * num_blocks(decode_len) <= num_cache_blocks
    for workload in (throughput, prefix):
        at_once = sorted(r.num_tokens for r in workload.requests)[-sizes.max_num_seqs :]
        assert sum(map(num_blocks, at_once)) <= num_cache_blocks


def test_prompts_of_the_prefix_workload_share_their_beginning_alone():
    workload = prefix_workload(FULL, vocab_size=50_000, seed=3)
    shared_len, own_len, num_output_tokens = FULL.prefix_lengths
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert {len(prompt) for prompt in prompts} == {shared_len + own_len}
    assert len({tuple(prompt[:shared_len]) for prompt in prompts}) == 1
    assert len({tuple(prompt[shared_len:]) for prompt in prompts}) == len(prompts)
    assert {request.num_output_tokens for request in workload.requests} == {num_output_tokens}


def test_throughput_workload_is_the_same_again_for_the_same_seed():
    first, again, other = (
        throughput_workload(FULL, vocab_size=50_000, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    lengths = [len(request.prompt_token_ids) for request in first.requests]
    assert len(lengths) == FULL.num_requests
    assert FULL.throughput_prompts[0] <= min(lengths) < max(lengths) <= FULL.throughput_prompts[1]
