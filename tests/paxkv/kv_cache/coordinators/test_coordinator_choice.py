"""Which coordinator a KV cache gets, and which KV caches are refused."""

import pytest

from paxkv.errors import ConfigError
from paxkv.kv_cache.coordinators.coordinator import (
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from paxkv.kv_cache.coordinators.coordinator_choice import get_kv_cache_coordinator
from paxkv.kv_cache.coordinators.hybrid_coordinator import HybridKVCacheCoordinator
from tests.paxkv.kv_cache.cache_fakes import cross, full, make_config, sinks, window


@pytest.mark.parametrize(
    ("specs", "enable_caching", "coordinator_class"),
    [
        ((full(),), True, UnitaryKVCacheCoordinator),
        ((window(8),), True, UnitaryKVCacheCoordinator),
        ((full(), full()), True, HybridKVCacheCoordinator),
        ((full(), window(8)), True, HybridKVCacheCoordinator),
        ((full(),), False, KVCacheCoordinatorNoPrefixCache),
        ((full(), window(8)), False, KVCacheCoordinatorNoPrefixCache),
        # What a decoder caches depends on the encoder's input, which hashes do not name.
        ((full(), cross()), True, KVCacheCoordinatorNoPrefixCache),
    ],
)
def test_the_coordinator_fits_groups_and_caching(specs, enable_caching, coordinator_class):
    coordinator = get_kv_cache_coordinator(make_config(*specs), enable_caching=enable_caching)
    assert type(coordinator) is coordinator_class
    is_cached = coordinator_class is not KVCacheCoordinatorNoPrefixCache
    assert coordinator.enable_caching == coordinator.block_pool.enable_caching == is_cached


def test_a_cache_without_groups_is_refused():
    with pytest.raises(ConfigError, match="no groups"):
        get_kv_cache_coordinator(make_config(), enable_caching=False)


def test_a_hash_must_not_cover_tokens_of_two_blocks():
    config = make_config(full(4), full(6), hash_block_size=4)
    with pytest.raises(ConfigError, match=r"hash_block_size=4 must divide .* \[4, 6\]"):
        get_kv_cache_coordinator(config, enable_caching=True)
    # Without caching nothing is hashed.
    get_kv_cache_coordinator(config, enable_caching=False)
    get_kv_cache_coordinator(make_config(full(4), full(6)), enable_caching=True)


def test_only_full_attention_is_spread_over_ranks():
    with pytest.raises(ConfigError, match="SlidingWindowSpec cannot be spread"):
        get_kv_cache_coordinator(
            make_config(full(), window(8)), enable_caching=True, pcp_world_size=2
        )
    coordinator = get_kv_cache_coordinator(
        make_config(full(), sinks(8)), enable_caching=True, pcp_world_size=2
    )
    assert [manager.block_size for manager in coordinator.single_type_managers] == [8, 8]
