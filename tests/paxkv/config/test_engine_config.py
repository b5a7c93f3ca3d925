"""The defaults are valid, and settings of different parts that exclude each other are refused."""

import pytest

from paxkv.config.engine_config import EngineConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.errors import ConfigError


def test_defaults_are_valid() -> None:
    config = EngineConfig()
    assert config.cache.enable_prefix_caching
    assert config.scheduler.policy == "fcfs"


def test_features_that_do_not_work_with_ranks_of_a_context_are_refused():
    parallel = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    EngineConfig(parallel=parallel)
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=1)
    for runner in (RunnerConfig(speculative_config=ngram), RunnerConfig(batch_invariant=True)):
        with pytest.raises(ConfigError, match="does not work with decode_context_parallel_size=2"):
            EngineConfig(parallel=parallel, runner=runner)


def test_features_that_do_not_work_on_several_hosts_are_refused():
    parallel = ParallelConfig(tensor_parallel_size=2, nnodes=2)
    EngineConfig(parallel=parallel, runner=RunnerConfig(max_logprobs=20))
    for runner, message in (
        (RunnerConfig(max_logprobs=21), "max_logprobs=21 does not work with nnodes=2"),
        (RunnerConfig(max_logprobs=-1), "max_logprobs=-1 does not work with nnodes=2"),
        (RunnerConfig(expert_load_window=5.0), "expert_load_window does not work with nnodes=2"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(parallel=parallel, runner=runner)
