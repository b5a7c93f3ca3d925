"""Coordinators: all groups do together what one group does, over one pool."""

import dataclasses
import types

import pytest

from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from paxkv.errors import ConfigError
from paxkv.kv_cache.coordinator import (
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    get_kv_cache_coordinator,
)

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def make_config(specs, num_blocks=10):
    groups = tuple(KVCacheGroupSpec(layer_names=(f"l{i}",), kv_cache_spec=s) for i, s in specs)
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups)


def config_of(*specs):
    return make_config(list(enumerate(specs)))


def ids(blocks):
    return tuple([block.block_id for block in group] for group in blocks)


def test_the_coordinator_fits_groups_and_caching():
    one, two = config_of(SPEC), config_of(SPEC, SPEC)
    cached = get_kv_cache_coordinator(one, enable_caching=True)
    assert isinstance(cached, UnitaryKVCacheCoordinator)
    for config in (one, two):
        plain = get_kv_cache_coordinator(config, enable_caching=False)
        assert isinstance(plain, KVCacheCoordinatorNoPrefixCache)


def test_what_this_version_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="one KV cache group, got 2"):
        get_kv_cache_coordinator(config_of(SPEC, SPEC), enable_caching=True)
    with pytest.raises(ConfigError, match="no groups"):
        get_kv_cache_coordinator(config_of(), enable_caching=False)
    with pytest.raises(ConfigError, match=r"\[4, 8\]"):
        wide = dataclasses.replace(SPEC, block_size=8)
        get_kv_cache_coordinator(config_of(SPEC, wide), enable_caching=False)
    with pytest.raises(ConfigError, match="no KV cache manager for KVCacheSpec"):
        get_kv_cache_coordinator(config_of(KVCacheSpec(block_size=4)), enable_caching=False)


def test_each_group_gets_its_own_blocks_of_one_pool():
    coordinator = get_kv_cache_coordinator(config_of(SPEC, SPEC, SPEC), enable_caching=False)
    assert coordinator.get_num_blocks_to_allocate("r", 5, ((), (), ())) == 6
    assert ids(coordinator.allocate_new_blocks("r", 5)) == ([1, 2], [3, 4], [5, 6])
    assert coordinator.get_num_blocks_to_allocate("r", 9, ((), (), ())) == 3
    assert ids(coordinator.allocate_new_blocks("r", 9)) == ([7], [8], [9])
    assert ids(coordinator.get_blocks("r")) == ([1, 2, 7], [3, 4, 8], [5, 6, 9])
    assert coordinator.block_pool.get_num_free_blocks() == 0
    coordinator.free("r", 9)
    assert coordinator.block_pool.get_num_free_blocks() == 9
    assert ids(coordinator.get_blocks("r")) == ([], [], [])


def test_without_prefix_cache_nothing_is_ever_found():
    coordinator = get_kv_cache_coordinator(config_of(SPEC), enable_caching=False)
    request = types.SimpleNamespace(request_id="r", block_hashes=[b"a"])
    coordinator.allocate_new_blocks("r", 4)
    coordinator.cache_blocks(request, 4)
    assert coordinator.find_longest_cache_hit([b"a"], 100) == (((),), 0)
    coordinator.block_pool.check_invariants()


def test_unitary_hit_counts_its_tokens():
    coordinator = get_kv_cache_coordinator(config_of(SPEC), enable_caching=True)
    request = types.SimpleNamespace(request_id="r", block_hashes=[b"a", b"b"])
    coordinator.allocate_new_blocks("r", 8)
    coordinator.cache_blocks(request, 8)
    blocks, num_tokens = coordinator.find_longest_cache_hit([b"a", b"b", b"c"], 100)
    assert (ids(blocks), num_tokens) == (([1, 2],), 8)
    assert coordinator.get_num_common_prefix_blocks("r") == [2]
