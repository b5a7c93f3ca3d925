"""Two engines that share the requests answer as one does."""

import os

import numpy as np
import pytest

from paxkv import LLM, SamplingParams
from paxkv.errors import ConfigError
from tests.oracles.make_checkpoint import write_random_checkpoint

SETTINGS = {
    "max_model_len": 64,
    "num_gpu_blocks_override": 24,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
}
VOCAB_SIZE = 512
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=2),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, max_tokens=12, min_tokens=4),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(
        tmp_path_factory.mktemp("model"),
        num_layers=1,
        hidden_size=64,
        intermediate_size=128,
        vocab_size=VOCAB_SIZE,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
    )


def answers(checkpoint, **settings) -> list[list[list[int]]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(1, VOCAB_SIZE, 20).tolist()
    prompts = [shared + rng.integers(1, VOCAB_SIZE, n).tolist() for n in (3, 20, 9, 1, 30, 2)]
    with LLM(str(checkpoint), **SETTINGS, **settings) as llm:
        outputs = [
            output for params in PARAMS for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        assert llm.get_stats().num_compiles_after_ready == 0
        assert llm.get_stats().num_running_reqs == 0
        assert llm.model_info.max_num_seqs == 2 * settings.get("data_parallel_size", 1)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each engine needs a core")
def test_tokens_are_those_of_one_engine(checkpoint) -> None:
    assert answers(checkpoint, data_parallel_size=2) == answers(checkpoint)


def test_more_engines_than_cores_are_refused(checkpoint) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=10000 is more than"):
        LLM(str(checkpoint), **SETTINGS, data_parallel_size=10_000)
    with pytest.raises(ConfigError, match="at least 1"):
        LLM(str(checkpoint), **SETTINGS, data_parallel_size=0)
