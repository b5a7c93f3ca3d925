"""The block pool: reference counts, eviction order, look-ups by hash, and a slow model."""

import types

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paxkv.errors import ConfigError, InvariantError
from paxkv.kv_cache.hashing.block_hash import get_block_hash
from paxkv.kv_cache.observers.block_movements import BlockMovementLog
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.pool.block_pool import BlockHashToBlockMap, BlockPool
from tests.slow_model.state_machine_settings import long, quick


def block_ids(blocks):
    return [block.block_id for block in blocks]


def cache(pool, blocks, block_hashes, *, num_cached_blocks=0, group_id=0):
    pool.cache_full_blocks(
        request=types.SimpleNamespace(block_hashes=block_hashes),
        blocks=blocks,
        num_cached_blocks=num_cached_blocks,
        num_full_blocks=len(block_hashes),
        block_size=16,
        kv_cache_group_id=group_id,
    )


def test_block_0_is_never_allocated():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    assert pool.null_block is pool.blocks[0]
    assert pool.get_num_free_blocks() == 3
    assert block_ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.get_usage() == 1.0
    pool.check_invariants()
    with pytest.raises(InvariantError):
        pool.get_new_blocks(1)


def test_a_pool_needs_at_least_two_blocks():
    with pytest.raises(ConfigError, match="num_blocks=1"):
        BlockPool(num_blocks=1, enable_caching=True)


def test_the_null_block_is_neither_counted_nor_cached():
    pool = BlockPool(num_blocks=3, enable_caching=True)
    blocks = [pool.null_block, *pool.get_new_blocks(1)]
    cache(pool, blocks, [b"a", b"b"])
    pool.touch(blocks)
    pool.free_blocks(reversed(blocks))
    assert pool.get_cached_block(b"a", [0]) is None
    assert block_ids(pool.get_cached_block(b"b", [0])) == [1]
    assert pool.blocks[1].ref_cnt == 1
    pool.check_invariants()


def test_blocks_are_reused_in_the_order_they_were_freed():
    pool = BlockPool(num_blocks=6, enable_caching=True)
    first = pool.get_new_blocks(3)  # 1 2 3; 4 and 5 stay free
    pool.free_blocks(reversed(first))
    assert block_ids(pool.get_new_blocks(5)) == [4, 5, 3, 2, 1]


def test_a_freed_block_is_found_until_it_is_reallocated():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks, [b"a", b"b"])
    pool.free_blocks(reversed(blocks))  # free now: 3 2 1
    pool.get_new_blocks(1)
    assert block_ids(pool.get_cached_block(b"b", [0])) == [2]
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"b", [0]) is None
    assert block_ids(pool.get_cached_block(b"a", [0])) == [1]
    pool.check_invariants()


def test_touched_block_leaves_the_free_queue_and_keeps_its_content():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    blocks = pool.get_new_blocks(1)
    cache(pool, blocks, [b"a"])
    pool.free_blocks(blocks)
    pool.touch(pool.get_cached_block(b"a", [0]))
    assert block_ids(pool.get_new_blocks(2)) == [2, 3]
    pool.touch(pool.get_cached_block(b"a", [0]))
    assert pool.blocks[1].ref_cnt == 2
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 1
    pool.check_invariants()


def test_freeing_a_free_block_raises():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(InvariantError, match="has no holder"):
        pool.free_blocks(blocks)


def test_caching_a_block_twice_raises():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks, [b"a"])
    cache(pool, blocks, [b"a", b"b"], num_cached_blocks=1)
    with pytest.raises(InvariantError, match="cached already"):
        cache(pool, blocks, [b"a"])


def test_a_hit_needs_a_block_of_every_group():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks[:1], [b"a"], group_id=0)
    assert pool.get_cached_block(b"a", [0, 1]) is None
    cache(pool, blocks[1:], [b"a"], group_id=1)
    assert block_ids(pool.get_cached_block(b"a", [0, 1])) == [1, 2]
    assert block_ids(pool.get_cached_block(b"a", [1])) == [2]


def test_a_cached_run_ends_at_the_first_gap():
    pool = BlockPool(num_blocks=8, enable_caching=True)
    blocks = pool.get_new_blocks(5)
    cache(pool, blocks[:3], [b"a", b"b", b"d"])
    cache(pool, blocks[3:], [b"a", b"c"], group_id=1)
    assert pool.get_cached_run([b"a", b"b", b"c", b"d"], 0) == blocks[:2]
    assert pool.get_cached_run([b"d", b"b"], 0) == [blocks[2], blocks[1]]
    assert pool.get_cached_run([b"a", b"b"], 1) == blocks[3:4]
    assert pool.get_cached_run([b"b"], 1) == pool.get_cached_run([], 0) == []
    # Of equal blocks the first is found.
    cache(pool, pool.get_new_blocks(1), [b"a"])
    assert pool.get_cached_run([b"a"], 0) == blocks[:1]


def test_a_block_that_is_passed_twice_is_evicted_once():
    log = BlockMovementLog()
    pool = BlockPool(num_blocks=4, enable_caching=True, observers=[log])
    cache(pool, pool.get_new_blocks(2), [b"a", b"b"])
    pool.evict_blocks([2, 1, 2])
    assert log.drain().evicted == [2, 1]
    assert pool.evicted_hashes.num_evicted == 2
    pool.check_invariants()


def test_an_evicted_block_is_not_found_but_still_held():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks, [b"a", b"b"])
    pool.evict(blocks[1:])
    assert pool.get_cached_block(b"b", [0]) is None
    assert pool.get_cached_block(b"a", [0]) == blocks[:1]
    assert blocks[1].ref_cnt == 1
    pool.check_invariants()


def test_evicting_a_block_by_id_keeps_equal_blocks():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks[:1], [b"a"])
    cache(pool, blocks[1:], [b"a"])
    # Of equal blocks the first is found.
    assert pool.get_cached_block(b"a", [0]) == blocks[:1]
    pool.evict_blocks([1])
    assert pool.get_cached_block(b"a", [0]) == blocks[1:]
    pool.evict_blocks({1, 2, 3})
    assert pool.get_cached_block(b"a", [0]) is None
    pool.check_invariants()


def test_larger_blocks_are_found_by_their_last_small_hash():
    pool = BlockPool(num_blocks=4, enable_caching=True, hash_block_size=8)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(
        request=types.SimpleNamespace(block_hashes=[b"a", b"b", b"c", b"d", b"e"]),
        blocks=blocks,
        num_cached_blocks=0,
        num_full_blocks=2,
        block_size=16,
        kv_cache_group_id=0,
    )
    found = {name: pool.get_cached_block(name, [0]) for name in (b"a", b"b", b"c", b"d", b"e")}
    assert found == {b"a": None, b"b": blocks[:1], b"c": None, b"d": blocks[1:], b"e": None}


def test_without_caching_allocation_does_not_evict():
    pool = BlockPool(num_blocks=3, enable_caching=False)
    pool.free_blocks(pool.get_new_blocks(2))
    assert block_ids(pool.get_new_blocks(2)) == [1, 2]
    assert pool.evicted_hashes.num_evicted == 0
    pool.check_invariants()


def test_the_movement_log_has_all_movements_in_order():
    log = BlockMovementLog()
    pool = BlockPool(num_blocks=4, enable_caching=True, observers=[log])
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks, [b"a", b"b"])
    pool.touch(blocks[:1])
    pool.free_blocks([blocks[1], blocks[0]])
    moved = log.drain()
    assert (moved.allocated, moved.cached, moved.shared) == ([1, 2], [1, 2], [1])
    assert (moved.freed, moved.evicted) == ([2], [])
    pool.get_new_blocks(2)
    pool.free_blocks([blocks[0]])
    moved = log.drain()
    assert (moved.allocated, moved.evicted, moved.freed) == ([3, 2], [2], [1])


def test_reset_reports_the_evicted_blocks():
    log = BlockMovementLog()
    pool = BlockPool(num_blocks=4, enable_caching=True, observers=[log])
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks[1:], [b"a"])
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert log.drain().evicted == [2]


def test_reset_fails_while_a_block_is_held():
    pool = BlockPool(num_blocks=4, enable_caching=True)
    blocks = pool.get_new_blocks(1)
    cache(pool, blocks, [b"a"])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a", [0]) == blocks
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a", [0]) is None
    pool.check_invariants()


def test_map_keeps_equal_blocks_apart():
    blocks = BlockPool(num_blocks=4, enable_caching=True).blocks
    cached = BlockHashToBlockMap()
    assert [cached.insert(b"a", block) for block in blocks[1:]] == [True, False, False]
    assert b"a" in cached
    assert len(cached) == 1
    assert cached.get_one_block(b"a") is blocks[1]
    assert cached.pop(b"a", 1) is blocks[1]
    assert cached.pop(b"a", 1) is None
    assert cached.get_one_block(b"a") is blocks[2]
    assert cached.pop(b"a", 2) is blocks[2]
    assert list(cached.items()) == [(b"a", blocks[3])]
    assert cached.pop(b"a", 2) is None
    assert cached.pop(b"a", 3) is blocks[3]
    assert cached.pop(b"a", 3) is None
    assert cached.get_one_block(b"a") is None
    assert len(cached) == 0


def test_check_invariants_detects_each_kind_of_damage():
    def damaged(damage):
        pool = BlockPool(num_blocks=4, enable_caching=True)
        blocks = pool.get_new_blocks(2)
        cache(pool, blocks, [b"a", b"b"])
        pool.check_invariants()
        damage(pool)
        return pool

    def forget_hash(pool):
        pool.blocks[1].block_hash = None

    def swap_hashes(pool):
        first, second = pool.blocks[1:3]
        first.block_hash, second.block_hash = second.block_hash, first.block_hash

    def lose_block(pool):
        pool.free_block_queue.popleft()

    def hold_free_block(pool):
        pool.blocks[3].ref_cnt = 1

    def drop_reference(pool):
        pool.blocks[1].ref_cnt = 0

    def hold_null_block(pool):
        pool.null_block.ref_cnt = 1

    def free_null_block(pool):
        pool.free_block_queue.append(pool.null_block)

    def miscount(pool):
        pool.free_block_queue.num_free_blocks += 1

    for damage in (
        forget_hash,
        swap_hashes,
        lose_block,
        hold_free_block,
        drop_reference,
        hold_null_block,
        free_null_block,
        miscount,
    ):
        with pytest.raises(InvariantError):
            damaged(damage).check_invariants()


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with lists and dicts: the same blocks, order and hits."""

    NUM_BLOCKS = 8

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(num_blocks=self.NUM_BLOCKS, enable_caching=True)
        self.free = list(range(1, self.NUM_BLOCKS))  # front first
        self.hash_of = {}
        self.held = []  # lists of block ids, one per holder

    def num_holders(self, block_id):
        return sum(blocks.count(block_id) for blocks in self.held)

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks):
        if num_blocks > len(self.free):
            with pytest.raises(InvariantError):
                self.pool.get_new_blocks(num_blocks)
            return
        expected, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert block_ids(self.pool.get_new_blocks(num_blocks)) == expected
        for block_id in expected:
            self.hash_of.pop(block_id, None)
        self.held.append(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), in_reverse=st.booleans())
    def release(self, data, in_reverse):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        ordered = blocks[::-1] if in_reverse else blocks
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in ordered)
        self.free += [block_id for block_id in ordered if self.num_holders(block_id) == 0]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def cache(self, data):
        blocks = data.draw(st.sampled_from(self.held))
        num_cached = 0
        while num_cached < len(blocks) and blocks[num_cached] in self.hash_of:
            num_cached += 1
        if any(block_id in self.hash_of for block_id in blocks[num_cached:]):
            return
        # Few different hashes, so several blocks often have the same hash.
        new_hashes = [bytes([data.draw(st.integers(0, 3))]) for _ in blocks[num_cached:]]
        cache(
            self.pool,
            [self.pool.blocks[block_id] for block_id in blocks],
            [b"unused"] * num_cached + new_hashes,
            num_cached_blocks=num_cached,
        )
        self.hash_of.update(zip(blocks[num_cached:], new_hashes, strict=True))

    @rule(hash_byte=st.integers(0, 3))
    def hit(self, hash_byte):
        # In the order in which they were cached: the first is found.
        equal = [block_id for block_id, name in self.hash_of.items() if name == bytes([hash_byte])]
        found = self.pool.get_cached_block(bytes([hash_byte]), [0])
        if not equal:
            assert found is None
            return
        (block,) = found
        assert block.block_id == equal[0]
        self.pool.touch(found)
        if block.block_id in self.free:
            self.free.remove(block.block_id)
        self.held.append([block.block_id])

    @rule(block_id=st.integers(1, NUM_BLOCKS - 1))
    def evict(self, block_id):
        self.pool.evict([self.pool.blocks[block_id]])
        self.hash_of.pop(block_id, None)

    @rule()
    def reset(self):
        is_idle = len(self.free) == self.NUM_BLOCKS - 1
        assert self.pool.reset_prefix_cache() == is_idle
        if is_idle:
            self.hash_of = {}

    @invariant()
    def pool_is_the_model(self):
        self.pool.check_invariants()
        assert block_ids(self.pool.free_block_queue.get_all_free_blocks()) == self.free
        assert self.pool.get_num_free_blocks() == len(self.free)
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == self.num_holders(block.block_id)
            name = self.hash_of.get(block.block_id)
            assert block.block_hash == (None if name is None else name + bytes(4))


class TestPoolMachine(PoolMachine.TestCase):
    settings = quick(20)


@pytest.mark.slow
class TestPoolMachineForLong(PoolMachine.TestCase):
    settings = long(1500)


class EventList(BlockPoolObserver):
    """Records every event, with the ids of its blocks."""

    def __init__(self):
        self.events = []

    def add(self, name, blocks, *others):
        self.events.append((name, block_ids(blocks), *others))

    def on_allocated(self, blocks):
        self.add("allocated", blocks, [block.ref_cnt for block in blocks])

    def on_touched(self, blocks):
        self.add("touched", blocks, [block.ref_cnt for block in blocks])

    def on_released(self, blocks, free_blocks):
        self.add("released", blocks, block_ids(free_blocks), [block.ref_cnt for block in blocks])

    def on_cached(self, *, blocks, block_idxs, first_idxs, group_id, **others):
        assert others.keys() == {"request", "block_hashes", "block_size"}
        self.add("cached", blocks, block_idxs, first_idxs, group_id)

    def on_evicted(self, blocks, keys, findable):
        assert [block.block_hash for block in blocks] == [None] * len(blocks)
        self.add("evicted", blocks, [get_block_hash(key) for key in keys if key not in findable])

    def on_replaced(self, request_id):
        self.events.append(("replaced", request_id))

    def on_reset(self, blocks):
        self.add("reset", blocks, [block.block_hash for block in blocks])


def test_observers_get_every_event_after_the_change():
    log = EventList()
    pool = BlockPool(num_blocks=5, enable_caching=True, observers=[log])
    blocks = pool.get_new_blocks(3)
    with_null = [pool.null_block, *blocks]
    cache(pool, blocks[2:], [b"b"])
    cache(pool, with_null[:3], [b"null", b"a", b"b"])
    pool.touch(with_null[:2])
    pool.free_blocks(iter([blocks[2], blocks[1], blocks[0], pool.null_block]))
    pool.evict([blocks[1], pool.null_block])  # another block still has its hash
    pool.get_new_blocks(2)
    pool.report_replaced("r")
    assert not pool.reset_prefix_cache()
    pool.free_blocks([blocks[0], pool.blocks[4], blocks[2]])
    assert pool.reset_prefix_cache()
    assert log.events == [
        ("allocated", [1, 2, 3], [1, 1, 1]),
        ("cached", [3], [0], [0], 0),
        ("cached", [1, 2], [1, 2], [1], 0),
        ("touched", [1], [2]),
        ("released", [3, 2, 1], [3, 2], [0, 0, 1]),
        ("evicted", [2], []),
        # Block 4 was never cached.
        ("evicted", [3], [b"b"]),
        ("allocated", [4, 3], [1, 1]),
        ("replaced", "r"),
        ("released", [1, 4, 3], [1, 4, 3], [0, 0, 0]),
        ("reset", [1], [None]),
    ]


def test_observers_can_be_added_later_and_removed():
    first, second = EventList(), EventList()
    pool = BlockPool(num_blocks=4, enable_caching=True, observers=[first])
    blocks = pool.get_new_blocks(1)
    pool.add_observer(second)
    assert pool.observers == (first, second)
    pool.touch(blocks)
    pool.remove_observer(first)
    pool.free_blocks(blocks)
    assert [event[0] for event in first.events] == ["allocated", "touched"]
    assert [event[0] for event in second.events] == ["touched", "released"]
    with pytest.raises(ValueError):
        pool.remove_observer(first)
