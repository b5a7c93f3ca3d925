"""Values of the cache's settings that cannot work are refused, with what is allowed."""

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.kv_events_config import KVEventsConfig
from paxkv.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: CacheConfig(kv_cache_dtype="fp8"), "kv_cache_dtype"),
        (lambda: CacheConfig(mamba_cache_dtype="fp8"), "mamba_cache_dtype"),
        (lambda: CacheConfig(mamba_ssm_cache_dtype="half"), "mamba_ssm_cache_dtype"),
        (lambda: CacheConfig(block_size=12), "block_size"),
        (lambda: CacheConfig(block_size=16.0), "block_size"),
        (lambda: CacheConfig(enable_prefix_caching="no"), "enable_prefix_caching"),
        (lambda: CacheConfig(num_gpu_blocks_override=1), "num_gpu_blocks_override"),
        (lambda: CacheConfig(gpu_memory_utilization=0.0), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=1.5), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization="most"), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=float("nan")), "gpu_memory_utilization"),
    ],
)
def test_the_error_names_the_invalid_setting(make, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()


@pytest.mark.parametrize("share", [-0.1, 1.1, "some", True, float("nan")])
def test_kv_cache_metrics_sample_must_be_in_0_to_1(share: object) -> None:
    with pytest.raises(ConfigError, match="kv_cache_metrics_sample"):
        CacheConfig(kv_cache_metrics_sample=share)


def test_kv_events_follow_the_json_and_are_off_by_default() -> None:
    assert CacheConfig().kv_events is None
    text = '{"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "ipc:///run/r", "topic": "kv"}'
    assert CacheConfig(kv_events_config=text).kv_events == KVEventsConfig(
        endpoint="tcp://127.0.0.1:1", replay_endpoint="ipc:///run/r", topic="kv"
    )
    assert CacheConfig(kv_events_config="{}").kv_events == KVEventsConfig()
    for off in ('{"enable_kv_cache_events": false}', '{"publisher": "null"}'):
        assert CacheConfig(kv_events_config=off).kv_events is None


def test_kv_events_need_prefix_caching() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        CacheConfig(kv_events_config="{}", enable_prefix_caching=False)
    config = CacheConfig(kv_events_config='{"publisher": "null"}', enable_prefix_caching=False)
    assert config.kv_events is None
