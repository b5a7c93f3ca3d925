"""The log names every block that changed, and how often content was found."""

from paxkv.kv_cache.block_changes import BlockChangeLog
from paxkv.kv_cache.block_pool import BlockPool
from tests.paxkv.scheduler.stepping import FunctionRunner, add, make_scheduler, step


def test_every_change_is_named_once_and_then_forgotten():
    pool = BlockPool(num_blocks=8, enable_caching=True)
    pool.change_log = log = BlockChangeLog()
    a, b, c = pool.get_new_blocks(3)
    assert log.take_changed() == ({a, b, c}, False, False)
    pool.touch([a, pool.null_block])
    assert log.take_changed() == ({a}, False, True)
    pool.free_blocks(block for block in (b, a))
    assert log.take_changed() == ({a, b}, True, False)
    assert (a.ref_cnt, b.ref_cnt, c.ref_cnt) == (1, 0, 1)
    assert log.take_changed() == (set(), False, False)
    assert log.num_hits == {a.block_id: 1}


def test_origin_and_hits_live_as_long_as_the_content():
    scheduler = make_scheduler(num_blocks=6)
    pool, runner = scheduler.kv_cache_manager.block_pool, FunctionRunner()
    pool.change_log = log = BlockChangeLog()
    for name in ("a", "b"):
        request = add(scheduler, name, list(range(9)), max_tokens=1)
        step(scheduler, runner)
    first, second = sorted(log.origins.items(), key=lambda item: item[1].block_idx)
    assert first[1].parent_hash is None and first[1].token_ids == (0, 1, 2, 3)
    assert second[1].parent_hash == request.block_hashes[0]
    assert log.num_hits == {first[0]: 1, second[0]: 1}
    add(scheduler, "other", 17, max_tokens=1)
    step(scheduler, runner)
    assert log.num_evictions == 2 and not log.num_hits
    assert len(log.origins) == 4 and (0, 1, 2, 3) not in [o.token_ids for o in log.origins.values()]
    assert scheduler.reset_prefix_cache()
    assert log.num_evictions == 6 and not log.origins
