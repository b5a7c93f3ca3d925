"""BlockPool against SlowPool: random operations, compared after each one."""

import types

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paxkv.contracts.kv_cache_spec import FullAttentionSpec
from paxkv.contracts.observation import AllBlocksCleared, BlockStored
from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.block_hash import make_block_hash_with_group_id
from paxkv.kv_cache.observers.event_recorder import KVEventRecorder
from paxkv.kv_cache.pool.block_pool import BlockPool
from tests.slow_model.slow_pool import SlowPool
from tests.slow_model.state_machine_settings import long, quick

NUM_CONTENTS = 3
NUM_GROUPS = 2
BLOCK_SIZE = 2
MAX_TABLE = 8
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")


def make_request(content):
    return types.SimpleNamespace(
        request_id=f"content{content}",
        block_hashes=[b"%d-%d" % (content, i) for i in range(MAX_TABLE)],
        all_token_ids=[content] * (MAX_TABLE * BLOCK_SIZE),
        lora_name=None,
    )


def real_key(key):
    content, group, i = key
    return make_block_hash_with_group_id(b"%d-%d" % (content, i), group)


class PoolMachine(RuleBasedStateMachine):
    """Block tables, as managers keep them, that grow, are shared, filled and released."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.event_recorder = KVEventRecorder([SPEC] * NUM_GROUPS)
        self.real = BlockPool(
            num_blocks=num_blocks,
            enable_caching=True,
            hash_block_size=BLOCK_SIZE,
            observers=[self.event_recorder],
        )
        self.slow = SlowPool(num_blocks)
        # (content, group, block ids); some are the null block.
        self.tables = []
        self.known_outside = set()

    def blocks(self, block_ids):
        return [self.real.blocks[block_id] for block_id in block_ids]

    @rule(num=st.integers(1, 4), content=st.integers(0, NUM_CONTENTS - 1), group=st.integers(0, 1))
    def get_new(self, num, content, group):
        if num > len(self.slow.free):
            with pytest.raises(InvariantError):
                self.real.get_new_blocks(num)
            return
        taken = [block.block_id for block in self.real.get_new_blocks(num)]
        assert taken == self.slow.get_new(num)
        self.tables.append((content, group, taken))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100), num=st.integers(1, 3))
    def grow(self, which, num):
        _, _, table = self.tables[which % len(self.tables)]
        if num <= len(self.slow.free) and len(table) + num <= MAX_TABLE:
            table += [block.block_id for block in self.real.get_new_blocks(num)]
            assert table[-num:] == self.slow.get_new(num)

    @precondition(lambda self: self.tables)
    @rule(
        which=st.integers(0, 100), left=st.integers(0, MAX_TABLE), right=st.integers(0, MAX_TABLE)
    )
    def fill(self, which, left, right):
        content, group, table = self.tables[which % len(self.tables)]
        left, right = min(left, len(table)), min(right, len(table))
        # A block that is already cached, as part of a hit, is not cached again.
        if any(b and self.slow.key_of(b) is not None for b in table[left:right]):
            return
        self.real.cache_full_blocks(
            request=make_request(content),
            blocks=self.blocks(table),
            num_cached_blocks=left,
            num_full_blocks=right,
            block_size=BLOCK_SIZE,
            kv_cache_group_id=group,
        )
        for i in range(left, right):
            if table[i]:
                self.slow.cache(table[i], (content, group, i))

    @rule(content=st.integers(0, NUM_CONTENTS - 1), group=st.integers(0, 1), num=st.integers(1, 4))
    def hit(self, content, group, num):
        table = []
        for i in range(num):
            found = self.real.get_cached_block(b"%d-%d" % (content, i), [group])
            expected = self.slow.find((content, group, i))
            assert (found and found[0].block_id) == expected
            table.append(expected or 0)
        both = self.real.get_cached_block(b"%d-0" % content, [0, 1])
        expected = [self.slow.find((content, g, 0)) for g in (0, 1)]
        assert (both and [b.block_id for b in both]) == (None if None in expected else expected)
        self.real.touch(self.blocks(table))
        self.slow.touch(table)
        self.tables.append((content, group, table))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100))
    def fork(self, which):
        content, group, table = self.tables[which % len(self.tables)]
        self.real.touch(self.blocks(table))
        self.slow.touch(table)
        self.tables.append((content, group, list(table)))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100), reverse=st.booleans())
    def release_blocks(self, which, reverse):
        _, _, table = self.tables.pop(which % len(self.tables))
        ordered = table[::-1] if reverse else table
        self.real.free_blocks(self.blocks(ordered))
        self.slow.release_blocks(ordered)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100), num=st.integers(1, 3))
    def leave_window(self, which, num):
        _, _, table = self.tables[which % len(self.tables)]
        left = table[:num][::-1]
        self.real.free_blocks(self.blocks(left))
        self.slow.release_blocks(left)
        table[:num] = [0] * len(left)

    @rule(which=st.integers(0, 100))
    def free_twice(self, which):
        """A double free raises and changes nothing."""
        if self.slow.free:
            block_id = self.slow.free[which % len(self.slow.free)]
            with pytest.raises(InvariantError):
                self.real.free_blocks(self.blocks([block_id]))

    @rule(block_ids=st.lists(st.integers(1, 11), max_size=3, unique=True))
    def withdraw(self, block_ids):
        block_ids = [b for b in block_ids if b < self.slow.num_blocks]
        self.real.evict_blocks(block_ids)
        for block_id in block_ids:
            self.slow.forget(block_id)

    @rule()
    def reset(self):
        assert self.real.reset_prefix_cache() == self.slow.reset()

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "real"):
            return
        self.real.check_invariants()
        free = [block.block_id for block in self.real.free_block_queue.get_all_free_blocks()]
        assert free == self.slow.free
        assert self.real.get_num_free_blocks() == len(self.slow.free)
        for block_id, block in enumerate(self.real.blocks):
            assert block.ref_cnt == self.slow.refs[block_id]
            key = self.slow.key_of(block_id)
            assert block.block_hash == (None if key is None else real_key(key))
        self.check_events()

    def check_events(self):
        """The events tell a subscriber exactly which blocks are cached."""
        for event in self.event_recorder.drain():
            if isinstance(event, AllBlocksCleared):
                self.known_outside.clear()
                continue
            keys = {make_block_hash_with_group_id(h, event.group_id) for h in event.block_hashes}
            assert len(keys) == len(event.block_hashes) > 0
            if isinstance(event, BlockStored):
                assert not keys & self.known_outside
                self.known_outside |= keys
                content, first = map(int, event.block_hashes[0].split(b"-"))
                assert event.parent_block_hash == (
                    None if first == 0 else b"%d-%d" % (content, first - 1)
                )
                assert event.token_ids == [content] * BLOCK_SIZE * len(event.block_hashes)
            else:
                assert keys <= self.known_outside
                self.known_outside -= keys
        assert self.known_outside == {real_key(key) for key, _ in self.slow.cached}

    def teardown(self):
        if not hasattr(self, "real"):
            return
        while self.tables:
            self.release_blocks(0, True)
        self.is_the_same()
        assert self.real.get_usage() == 0
        assert self.real.reset_prefix_cache()


class TestBlockPool(PoolMachine.TestCase):
    settings = quick(40)


@pytest.mark.slow
class TestBlockPoolForLong(PoolMachine.TestCase):
    settings = long(2000)
