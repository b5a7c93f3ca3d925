"""Sinks: blocks of the layers, allocated once and never freed."""

import pytest

from paxkv.errors import ConfigError
from paxkv.kv_cache.managers.sink_full_attention import SinkFullAttentionManager
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    admit,
    finish_step,
    full,
    ids,
    make_manager,
    run_alone,
    sinks,
    table,
)


def sink_ids(manager, group=0):
    group_manager = manager.coordinator.single_type_managers[group]
    assert isinstance(group_manager, SinkFullAttentionManager)
    return ids(group_manager.sink_blocks)


def test_sinks_are_the_first_blocks_and_in_no_block_table():
    manager = make_manager(sinks(8), num_blocks=6)
    assert sink_ids(manager) == [1, 2]
    request = FakeRequest("r", range(9))
    assert admit(manager, request)
    assert table(manager, request) == [3, 4, 5]
    finish_step(request)
    manager.check_invariants()
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 3
    assert all(manager.block_pool.blocks[block_id].ref_cnt == 1 for block_id in (1, 2))
    manager.check_invariants()


def test_each_group_has_its_own_sinks():
    manager = make_manager(sinks(4), full(), sinks(8))
    assert (sink_ids(manager, 0), sink_ids(manager, 2)) == ([1], [2, 3])


def test_sinks_do_not_change_prefix_hits():
    manager = make_manager(sinks(8))
    request = run_alone(manager, "r", range(9))
    hits, num_hits = manager.get_computed_blocks(FakeRequest("s", range(9)))
    assert (hits.get_block_ids(), num_hits) == ((table(manager, request)[:2],), 8)


def test_the_cache_can_be_reset_while_only_sinks_are_held():
    manager = make_manager(sinks(8))
    request = run_alone(manager, "r", range(9))
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 0


def test_an_idle_pool_with_sinks_is_empty():
    manager = make_manager(sinks(8))
    assert manager.usage == 0
    assert manager.count_slots([]) == (0, 0)
    request = run_alone(manager, "r", range(6))
    assert manager.usage == pytest.approx(2 / 17)
    assert manager.count_slots([request]) == (8, 6)


@pytest.mark.parametrize("sink_len", [0, 3, 6])
def test_sinks_must_fill_whole_blocks(sink_len):
    with pytest.raises(ConfigError, match=f"{sink_len=} must be a positive multiple of the 4"):
        make_manager(sinks(sink_len))


def test_a_pool_that_sinks_fill_completely_is_rejected():
    with pytest.raises(ConfigError, match="layers need 4 permanent KV cache blocks, and only 4"):
        make_manager(sinks(16), num_blocks=5)
