"""An engine that counts the load of experts makes the same tokens, and counts every one."""

import logging
import time

import numpy as np
import pytest

from models import load_model
from paxkv import LLM, SamplingParams
from tests.oracles.paged_stepper import PagedStepper
from tests.oracles.token_experts import DENSE_LAYERS, NUM_LAYERS, TOP_K, VOCAB, write_config

WINDOW_S = 0.001
NUM_SPARSE = NUM_LAYERS - len(DENSE_LAYERS)
SETTINGS = {
    "load_format": "dummy",
    "max_model_len": 48,
    "num_gpu_blocks_override": 24,
    "max_num_seqs": 2,
    # One program of steps, with two widths.
    "max_num_batched_tokens": 24,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("moe"))


def wait_for_choices(llm, num_choices):
    """The statistics once all windows of the steps before are over and read."""
    deadline = time.monotonic() + 60
    while True:
        stats = llm.get_stats()
        if sum(map(sum, stats.expert_tokens.values())) >= num_choices:
            return stats
        assert time.monotonic() < deadline, stats.expert_tokens


@pytest.mark.slow
def test_engine_counts_all_tokens_and_draws_the_right_ones(folder, caplog):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, n).tolist() for n in (30, 5, 9)]
    num_tokens = (9, 12, 7)
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in num_tokens
    ]
    with (
        caplog.at_level(logging.INFO),
        LLM(str(folder), expert_load_window=WINDOW_S, **SETTINGS) as llm,
    ):
        (alone,) = llm.generate(prompts[:1], params[:1], use_tqdm=False)
        stats = wait_for_choices(llm, TOP_K * (2 + 8 + (NUM_SPARSE - 1) * (30 + 8)))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.get_stats().num_compiles_after_ready == 0
    # A prompt in two steps, then bursts of 8 tokens in all: the last one is never computed.
    assert stats.num_scheduled_tokens == 30 + 8
    totals = {layer: sum(counts) for layer, counts in stats.expert_tokens.items()}
    sparse = [layer for layer in range(NUM_LAYERS) if layer not in DENSE_LAYERS]
    # The last layer computes the last token of each step of the prompt.
    assert totals == dict.fromkeys(sparse, TOP_K * (30 + 8)) | {sparse[-1]: TOP_K * (2 + 8)}
    assert "expert load in" in caplog.text
    oracle = PagedStepper(load_model(folder, dtype="float32", load_format="dummy"))
    assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        token_ids = output.outputs[0].token_ids
        logits = oracle.step({row: [*prompt, *token_ids[:-1]]})[row][len(prompt) - 1 :]
        assert token_ids == np.argmax(logits, axis=-1).tolist()
