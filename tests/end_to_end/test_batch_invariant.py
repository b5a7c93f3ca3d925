"""With `--batch-invariant` a request's logits have the same bits whatever else the engine does."""

import dataclasses

import numpy as np
import pytest

from tests.end_to_end.engine_harness import EngineSettings, RecordingRunner, greedy, run_engine
from tests.engine_compilations import user_engine_compilations
from tests.oracles.make_checkpoint import write_random_checkpoint

BLOCK_SIZE, NUM_NEW_TOKENS = 16, 6
ROOMY = EngineSettings(block_size=BLOCK_SIZE, num_blocks=200, max_num_batched_tokens=2048)
SETTINGS = {
    "all_at_once": ROOMY,
    "no_prefix_cache": dataclasses.replace(ROOMY, enable_prefix_caching=False),
    "arriving_while_others_run": dataclasses.replace(ROOMY, arrival_gap=2),
    "prompts_in_pieces": dataclasses.replace(ROOMY, max_num_batched_tokens=11),
    "preempted": dataclasses.replace(ROOMY, num_blocks=31, enable_prefix_caching=False),
    "a_step_ahead": dataclasses.replace(ROOMY, max_steps_in_flight=2, max_num_batched_tokens=50),
}


def make_prompts():
    """Four prompts, two of which begin with the same 100 tokens."""
    rng = np.random.default_rng(0)
    shared, *others = (rng.integers(1, 500, n).tolist() for n in (100, 200, 3, 45, 130))
    return [shared + others[0], others[1], shared + others[2], others[3]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Wide enough for products whose rounding depends on the number of rows."""
    return write_random_checkpoint(
        tmp_path_factory.mktemp("model"),
        family="qwen3",
        num_layers=2,
        hidden_size=512,
        intermediate_size=1536,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=512,
    )


def run(runner, prompts, name):
    params = greedy(len(prompts), NUM_NEW_TOKENS)
    return run_engine(runner, prompts, SETTINGS[name], sampling_params=params)


@pytest.fixture(scope="module")
def runner(checkpoint):
    with user_engine_compilations():
        return RecordingRunner(checkpoint, BLOCK_SIZE, max_model_len=512, batch_invariant=True)


@pytest.fixture(scope="module")
def alone(runner):
    """Bits of the logits of each request that runs alone, i32[num_new_tokens, vocab]."""
    return [bits(run(runner, [prompt], "all_at_once").logits[0]) for prompt in make_prompts()]


def bits(logits):
    return np.stack(logits).view(np.int32)


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_have_the_bits_that_they_have_alone(runner, alone, name):
    result = run(runner, make_prompts(), name)
    for logits, expected in zip(result.logits, alone, strict=True):
        np.testing.assert_array_equal(bits(logits), expected)
    assert (result.num_preemptions > 0) == (name == "preempted")
    assert (sum(result.num_cached_tokens) > 0) == (name not in ("no_prefix_cache", "preempted"))


@pytest.mark.slow
def test_plain_steps_give_the_same_tokens_and_do_not_keep_that_promise(checkpoint, runner, alone):
    """Or the test above would show nothing."""
    with user_engine_compilations():
        plain = RecordingRunner(checkpoint, BLOCK_SIZE, max_model_len=512)
    result = run(plain, make_prompts(), "prompts_in_pieces")
    assert result.token_ids == run(runner, make_prompts(), "all_at_once").token_ids
    for logits, expected in zip(result.logits, alone, strict=True):
        np.testing.assert_allclose(logits, expected.view(np.float32), atol=1e-4)
    assert not all(
        np.array_equal(bits(logits), expected)
        for logits, expected in zip(result.logits, alone, strict=True)
    )
    # Nor with themselves: it is no matter of other code.
    at_once = run(plain, make_prompts(), "all_at_once")
    assert not np.array_equal(np.array(at_once.logits), np.array(result.logits))
