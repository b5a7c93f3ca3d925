"""Configuration is checked when it is made, with a message that says what is allowed."""

import pytest

from paxkv.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from paxkv.errors import ConfigError


def test_defaults_are_valid() -> None:
    config = EngineConfig()
    assert config.cache.enable_prefix_caching
    assert config.scheduler.policy == "fcfs"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: CacheConfig(block_size=12), "block_size"),
        (lambda: CacheConfig(block_size=16.0), "block_size"),
        (lambda: CacheConfig(enable_prefix_caching="no"), "enable_prefix_caching"),
        (lambda: CacheConfig(num_gpu_blocks_override=1), "num_gpu_blocks_override"),
        (lambda: CacheConfig(gpu_memory_utilization=0.0), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=1.5), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization="most"), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=float("nan")), "gpu_memory_utilization"),
        (lambda: SchedulerConfig(enable_chunked_prefill=1), "enable_chunked_prefill"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs"),
        (lambda: SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4), "max_num_seqs=8"),
        (lambda: SchedulerConfig(policy="lottery"), "fcfs, priority"),
        (lambda: ModelConfig(dtype="int3"), "float32"),
        (lambda: ModelConfig(max_model_len=1), "max_model_len"),
        (lambda: ModelConfig(seed=2**63), "seed"),
        (lambda: ModelConfig(seed="lucky"), "seed"),
        (lambda: ServerConfig(port=70000), "65535"),
        (lambda: ServerConfig(port="http"), "65535"),
        (lambda: ServerConfig(shutdown_timeout_s=-1), "shutdown_timeout_s"),
        (lambda: ServerConfig(shutdown_timeout_s=float("inf")), "shutdown_timeout_s"),
    ],
)
def test_bad_setting_names_itself(make, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()
