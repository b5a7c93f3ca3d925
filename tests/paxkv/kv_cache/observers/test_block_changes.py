"""The log has every changed block, its content, and the number of its hits."""

import pytest

from paxkv.contracts.observation import HASH_BYTES
from paxkv.kv_cache.observers.block_changes import BlockChangeLog
from paxkv.kv_cache.pool.block_pool import BlockPool
from tests.paxkv.scheduler.stepping import FunctionRunner, add, make_scheduler, step


def changed(log, new_blocks=()):
    return log.drain_changed(new_blocks).tolist()


def test_every_changed_block_is_drained_once():
    pool = BlockPool(num_blocks=8, enable_caching=True)
    log = BlockChangeLog(pool.blocks)
    pool.add_observer(log)
    a, b, c = pool.get_new_blocks(3)
    assert changed(log, (a, b, c)) == [a.block_id, b.block_id, c.block_id]
    pool.touch([a, pool.null_block])
    assert log.has_shared
    assert changed(log) == [a.block_id] and not log.has_shared
    assert log.ref_cnts.tolist() == [block.ref_cnt for block in pool.blocks]
    pool.free_blocks(block for block in (b, a, pool.null_block))
    assert changed(log) == [a.block_id, b.block_id]
    assert log.ref_cnts.tolist() == [block.ref_cnt for block in pool.blocks]
    assert (a.ref_cnt, b.ref_cnt, c.ref_cnt) == (1, 0, 1)
    assert changed(log) == []
    assert log.num_hits.tolist() == [0, 1] + [0] * 6
    # Blocks that were never cached have no hits.
    pool.free_blocks([a])
    assert not log.num_hits.any()


def test_caching_and_evicting_a_block_are_changes():
    scheduler, runner = make_scheduler(num_blocks=3), FunctionRunner()
    pool = scheduler.kv_cache_manager.block_pool
    log = BlockChangeLog(pool.blocks)
    pool.add_observer(log)
    add(scheduler, "a", 3, max_tokens=2)
    step(scheduler, runner)
    (block,) = scheduler.kv_cache_manager.coordinator.get_blocks("a")[0]
    assert changed(log, (block,)) == [block.block_id]
    # The first sampled token fills the block.
    scheduler.schedule()
    assert changed(log) == [block.block_id]
    pool.evict_blocks([block.block_id])
    assert changed(log) == [block.block_id]


def contents(log):
    """Depth -> (id, hash, parent) of all content whose depth is known."""
    return sorted(
        (int(content["depth"]), block_id, bytes(content["hash"]), bytes(content["parent"]))
        for block_id, content in enumerate(log.contents)
        if content["depth"]
    )


@pytest.mark.parametrize("look_in_between", [False, True])
def test_content_and_hits_are_kept_while_the_block_is_cached(look_in_between):
    scheduler = make_scheduler(num_blocks=6)
    pool, runner = scheduler.kv_cache_manager.block_pool, FunctionRunner()
    log = BlockChangeLog(pool.blocks, keeps_tokens=True)
    pool.add_observer(log)
    for name in ("a", "b"):
        request = add(scheduler, name, list(range(9)), max_tokens=1)
        step(scheduler, runner)
    if look_in_between:
        short = [block_hash[:HASH_BYTES] for block_hash in request.block_hashes]
        (_, first, *rest), (_, second, *last) = contents(log)
        assert (rest, last) == ([short[0], bytes(HASH_BYTES)], [short[1], short[0]])
        assert log.token_ids == {first: (0, 1, 2, 3), second: (4, 5, 6, 7)}
        assert (log.num_hits[first], log.num_hits[second], log.num_hits.sum()) == (1, 1, 2)
    other = add(scheduler, "other", 17, max_tokens=1)
    step(scheduler, runner)
    assert log.num_evictions == 2 and not log.num_hits.any()
    # Blocks that were cached, evicted and cached again between two reads have the latest content.
    hashes = [block_hash[:HASH_BYTES] for block_hash in other.block_hashes]
    assert [row[2] for row in contents(log)] == hashes and len(hashes) == 4
    assert (0, 1, 2, 3) not in log.token_ids.values()
    assert scheduler.reset_prefix_cache()
    assert log.num_evictions == 6 and contents(log) == [] and not log.token_ids
    assert not any(bytes(content["hash"]).strip(b"\0") for content in log.contents)


def test_on_seen_completes_content_cached_before_the_log():
    scheduler = make_scheduler()
    pool, runner = scheduler.kv_cache_manager.block_pool, FunctionRunner()
    request = add(scheduler, "a", list(range(9)), max_tokens=5)
    step(scheduler, runner)
    log = BlockChangeLog(pool.blocks)
    first, second, third = scheduler.kv_cache_manager.coordinator.get_blocks("a")[0]
    hashes = [block_hash[:HASH_BYTES] for block_hash in request.block_hashes]
    known = [bytes(log.contents["hash"][block.block_id]) for block in (first, second)]
    assert known == hashes and contents(log) == []
    log.on_seen(request, [second, third], 1, request.block_hashes, 4)
    assert contents(log) == [(2, second.block_id, hashes[1], hashes[0])]


def test_buffers_do_not_outgrow_the_pool_without_reads():
    scheduler = make_scheduler(num_blocks=6)
    pool, runner = scheduler.kv_cache_manager.block_pool, FunctionRunner()
    log = BlockChangeLog(pool.blocks)
    pool.add_observer(log)
    for i in range(20):
        add(scheduler, f"r{i}", [1000 * i + j for j in range(9)], max_tokens=1)
        step(scheduler, runner)
        assert len(log._ids) <= 2 * pool.num_blocks
