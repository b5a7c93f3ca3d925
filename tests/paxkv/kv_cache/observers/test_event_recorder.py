"""KV events: when they are sent, their content, and that a reader always knows the cache."""

import types

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from paxkv.contracts.observation import AllBlocksCleared, BlockRemoved, BlockStored
from paxkv.kv_cache.hashing.block_hash import BlockHasher, get_block_hash, get_group_id
from paxkv.kv_cache.observers.event_recorder import KVEventRecorder
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool
from tests.slow_model.state_machine_settings import long, quick

FIELDS = {"block_size": 2, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
SPECS = (
    FullAttentionSpec(**FIELDS, sliding_window=6),
    MLAAttentionSpec(**FIELDS | {"block_size": 4}),
    SlidingWindowSpec(**FIELDS, sliding_window=6),
)


def make_pool(num_blocks=6, hash_block_size=2):
    """A pool and the recorder of its events."""
    recorder = KVEventRecorder(SPECS)
    pool = BlockPool(
        num_blocks=num_blocks,
        enable_caching=True,
        hash_block_size=hash_block_size,
        observers=[recorder],
    )
    return pool, recorder


def make_request(token_ids, lora_name=None):
    block_hashes = []
    BlockHasher(block_size=2, seed="s").extend(block_hashes, token_ids)
    return types.SimpleNamespace(
        all_token_ids=token_ids, block_hashes=block_hashes, lora_name=lora_name
    )


def cache(pool, request, blocks, *, start=0, block_size=2, group_id=0):
    pool.cache_full_blocks(
        request=request,
        blocks=blocks,
        num_cached_blocks=start,
        num_full_blocks=len(blocks),
        block_size=block_size,
        kv_cache_group_id=group_id,
    )


def stored(block_hashes, parent, token_ids, *, block_size=2, lora_name=None, group_id=0):
    return BlockStored(
        block_hashes=block_hashes,
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=block_size,
        lora_name=lora_name,
        group_id=group_id,
        kind=("full_attention", "mla_attention", "sliding_window")[group_id],
        # The first group has layers with windows, but keeps the blocks of all tokens.
        sliding_window=(None, None, 6)[group_id],
    )


def removed(*block_hashes, group_id=0):
    return BlockRemoved(block_hashes=list(block_hashes), group_id=group_id)


def test_blocks_cached_in_one_call_are_one_event_with_tokens_and_parent():
    (pool, recorder), request = make_pool(), make_request([1, 2, 3, 4, 5, 6, 7], lora_name="l")
    h0, h1, h2 = request.block_hashes
    blocks = pool.get_new_blocks(3)
    cache(pool, request, blocks[:1])
    cache(pool, request, blocks, start=1)
    assert recorder.drain() == [
        stored([h0], None, [1, 2], lora_name="l"),
        stored([h1, h2], h0, [3, 4, 5, 6], lora_name="l"),
    ]
    assert recorder.drain() == []


def test_an_event_does_not_change_with_the_request():
    (pool, recorder), request = make_pool(), make_request([1, 2])
    cache(pool, request, pool.get_new_blocks(1))
    request.all_token_ids[:] = [9, 9]
    assert recorder.drain()[0].token_ids == [1, 2]


def test_larger_blocks_of_another_group_are_stored_with_their_own_size():
    (pool, recorder), request = make_pool(), make_request([1, 2, 3, 4, 5, 6, 7, 8])
    _, h1, _, h3 = request.block_hashes
    blocks = pool.get_new_blocks(2)
    cache(pool, request, blocks[:1], block_size=4, group_id=1)
    cache(pool, request, blocks, start=1, block_size=4, group_id=1)
    assert recorder.drain() == [
        stored([h1], None, [1, 2, 3, 4], block_size=4, group_id=1),
        stored([h3], h1, [5, 6, 7, 8], block_size=4, group_id=1),
    ]


def test_null_blocks_are_in_no_event():
    (pool, recorder), request = make_pool(), make_request(list(range(10)))
    _, h1, h2, _, h4 = request.block_hashes
    first, second, third = pool.get_new_blocks(3)
    null = pool.null_block
    cache(pool, request, [null, first, second, null, third])
    assert recorder.drain() == [
        stored([h1, h2], request.block_hashes[0], [2, 3, 4, 5]),
        stored([h4], request.block_hashes[3], [8, 9]),
    ]
    cache(pool, request, [null, null])
    assert recorder.drain() == []


def test_a_freed_block_is_reported_removed_only_when_it_is_reallocated():
    (pool, recorder), request = make_pool(num_blocks=4), make_request([1, 2, 3, 4])
    h0, h1 = request.block_hashes
    blocks = pool.get_new_blocks(2)
    cache(pool, request, blocks)
    recorder.drain()
    pool.free_blocks(reversed(blocks))
    pool.touch(blocks[:1])
    pool.free_blocks(blocks[:1])
    assert recorder.drain() == []
    pool.get_new_blocks(1)  # block 3, which had no content
    assert recorder.drain() == []
    pool.get_new_blocks(2)
    assert recorder.drain() == [removed(h1, h0)]


def test_a_group_of_windows_is_stored_with_their_length():
    (pool, recorder), request = make_pool(), make_request([1, 2])
    cache(pool, request, pool.get_new_blocks(1), group_id=2)
    assert recorder.drain() == [stored(request.block_hashes, None, [1, 2], group_id=2)]


def test_evicted_blocks_are_reported_removed_per_group():
    (pool, recorder), request = make_pool(), make_request([1, 2, 3, 4])
    h0, h1 = request.block_hashes
    blocks = pool.get_new_blocks(4)
    cache(pool, request, blocks[:2], group_id=0)
    cache(pool, request, blocks[2:], group_id=1)
    recorder.drain()
    pool.evict(blocks[1:])
    assert recorder.drain() == [removed(h1), removed(h0, h1, group_id=1)]
    pool.evict_blocks([blocks[0].block_id, blocks[3].block_id])
    assert recorder.drain() == [removed(h0)]


def test_equal_blocks_are_reported_stored_once_and_removed_with_the_last():
    (pool, recorder), request = make_pool(), make_request([1, 2])
    (h0,) = request.block_hashes
    first, second = pool.get_new_blocks(2)
    cache(pool, request, [first])
    cache(pool, request, [second])
    assert recorder.drain() == [stored([h0], None, [1, 2])]
    pool.evict([first])
    assert recorder.drain() == []
    pool.evict([second])
    assert recorder.drain() == [removed(h0)]
    cache(pool, request, [first])
    cache(pool, request, [second])
    recorder.drain()
    pool.evict([first, second])
    assert recorder.drain() == [removed(h0)]


def test_only_a_successful_reset_is_reported():
    (pool, recorder), request = make_pool(), make_request([1, 2])
    blocks = pool.get_new_blocks(1)
    cache(pool, request, blocks)
    recorder.drain()
    assert not pool.reset_prefix_cache()
    assert recorder.drain() == []
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert recorder.drain() == [AllBlocksCleared()]
    pool.get_new_blocks(5)
    assert recorder.drain() == []


def test_events_are_split_at_every_gap():
    recorder, request = KVEventRecorder(SPECS), make_request(list(range(12)))
    hashes = request.block_hashes
    for first_idxs in ([0, 2, 3, 5], []):
        recorder.on_cached(
            request=request,
            blocks=[KVCacheBlock(block_id) for block_id in range(6)],
            block_idxs=list(range(6)),
            first_idxs=first_idxs,
            block_hashes=hashes,
            block_size=2,
            group_id=0,
        )
    assert [(e.block_hashes, e.parent_block_hash, e.token_ids) for e in recorder.drain()] == [
        ([hashes[0]], None, [0, 1]),
        (hashes[2:4], hashes[1], [4, 5, 6, 7]),
        ([hashes[5]], hashes[4], [10, 11]),
    ]


class Subscriber:
    """A subscriber as in a router: the hashes of each group, and the prefix of tokens per hash."""

    def __init__(self):
        self.known = set()
        self.tokens_of = {}

    def read(self, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
            elif isinstance(event, BlockRemoved):
                gone = {(event.group_id, block_hash) for block_hash in event.block_hashes}
                assert gone <= self.known
                assert len(gone) == len(event.block_hashes)
                self.known -= gone
            else:
                self.read_stored(event)

    def read_stored(self, event):
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes) > 0
        for idx, block_hash in enumerate(event.block_hashes):
            assert (event.group_id, block_hash) not in self.known
            self.known.add((event.group_id, block_hash))
            # A parent after a null block has a hash, but its tokens were never sent.
            before = self.tokens_of.get(parent, []) if parent is not None else []
            if parent is None or parent in self.tokens_of:
                self.tokens_of[block_hash] = before + event.token_ids[idx * size : (idx + 1) * size]
            parent = block_hash


class EventMachine(RuleBasedStateMachine):
    """Random use of a pool: after each step, a reader of the events knows all cached hashes."""

    def __init__(self):
        super().__init__()
        self.pool, self.recorder = make_pool(num_blocks=9)
        self.subscriber = Subscriber()
        self.held = []
        self.prompts = {}

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=2, max_size=12),
        scale=st.sampled_from([1, 2]),
        num_null=st.integers(0, 2),
        num_calls=st.integers(1, 3),
    )
    def cache_a_request(self, token_ids, scale, num_null, num_calls):
        block_size = 2 * scale
        num_blocks = len(token_ids) // block_size
        num_null = min(num_null, num_blocks)
        if num_blocks - num_null > self.pool.get_num_free_blocks():
            return
        request = make_request(token_ids)
        for idx, block_hash in enumerate(request.block_hashes):
            self.prompts[block_hash] = token_ids[: 2 * (idx + 1)]
        own = self.pool.get_new_blocks(num_blocks - num_null)
        blocks = [self.pool.null_block] * num_null + own
        bounds = [num_blocks * call // num_calls for call in range(num_calls + 1)]
        for start, end in zip(bounds, bounds[1:], strict=False):
            cache(
                self.pool, request, blocks[:end], start=start, block_size=block_size, group_id=scale
            )
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        idx = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free_blocks(reversed(self.held.pop(idx)))

    @rule(block_ids=st.sets(st.integers(0, 8), max_size=3))
    def evict(self, block_ids):
        self.pool.evict_blocks(block_ids)

    @precondition(lambda self: self.held)
    @rule()
    def share(self):
        self.pool.touch(self.held[0])
        self.held.append(self.held[0])

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()

    @invariant()
    def subscriber_has_the_cached_hashes(self):
        self.subscriber.read(self.recorder.drain())
        findable = {
            (get_group_id(key), get_block_hash(key))
            for key, _ in self.pool.cached_block_hash_to_block.items()
        }
        assert self.subscriber.known == findable
        for block_hash, tokens in self.subscriber.tokens_of.items():
            assert tokens == self.prompts[block_hash]
        self.pool.check_invariants()


class TestEventMachine(EventMachine.TestCase):
    settings = quick(30)


@pytest.mark.slow
class TestEventMachineForLong(EventMachine.TestCase):
    settings = long(1000)
