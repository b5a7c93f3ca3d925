"""The coordinator class of a KV cache, and the KV caches that are rejected."""

import pytest

from paxkv.errors import ConfigError
from paxkv.kv_cache.coordinators.coordinator import (
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from paxkv.kv_cache.coordinators.coordinator_choice import get_kv_cache_coordinator
from paxkv.kv_cache.coordinators.hybrid_coordinator import HybridKVCacheCoordinator
from tests.paxkv.kv_cache.cache_fakes import cross, full, make_config, window


@pytest.mark.parametrize(
    ("specs", "enable_caching", "coordinator_class"),
    [
        ((full(),), True, UnitaryKVCacheCoordinator),
        ((window(8),), True, UnitaryKVCacheCoordinator),
        ((full(), full()), True, HybridKVCacheCoordinator),
        ((full(), window(8)), True, HybridKVCacheCoordinator),
        ((full(),), False, KVCacheCoordinatorNoPrefixCache),
        ((full(), window(8)), False, KVCacheCoordinatorNoPrefixCache),
        # The decoder's K and V depend on the encoder's input, which hashes do not cover.
        ((full(), cross()), True, KVCacheCoordinatorNoPrefixCache),
    ],
)
def test_groups_and_caching_decide_the_coordinator_class(specs, enable_caching, coordinator_class):
    coordinator = get_kv_cache_coordinator(make_config(*specs), enable_caching=enable_caching)
    assert type(coordinator) is coordinator_class
    is_cached = coordinator_class is not KVCacheCoordinatorNoPrefixCache
    assert coordinator.enable_caching == coordinator.block_pool.enable_caching == is_cached


def test_a_cache_without_groups_is_rejected():
    with pytest.raises(ConfigError, match="no groups"):
        get_kv_cache_coordinator(make_config(), enable_caching=False)


def test_hash_block_size_must_divide_every_block_size():
    config = make_config(full(4), full(6), hash_block_size=4)
    with pytest.raises(ConfigError, match=r"hash_block_size=4 must divide .* \[4, 6\]"):
        get_kv_cache_coordinator(config, enable_caching=True)
    # Without caching there are no hashes.
    get_kv_cache_coordinator(config, enable_caching=False)
    get_kv_cache_coordinator(make_config(full(4), full(6)), enable_caching=True)
