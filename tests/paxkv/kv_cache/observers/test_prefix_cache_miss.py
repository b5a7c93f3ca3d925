"""Reasons of prefix cache misses, each in a pool to which it applies."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.kv_cache.hashing.block_hash import BlockHasher, with_block_size
from paxkv.kv_cache.hashing.extra_keys import ExtraKeySources
from paxkv.kv_cache.observers import prefix_cache_miss
from paxkv.kv_cache.observers.prefix_cache_miss import PrefixCacheMissExplainer, PrefixGroup
from paxkv.kv_cache.pool.block_pool import BlockPool
from tests.paxkv.kv_cache.cache_fakes import (
    FakeRequest,
    chunked,
    full,
    make_manager,
    run_alone,
    window,
)
from tests.slow_model.state_machine_settings import quick

BLOCK_SIZE = 2


class Cache:
    """A pool with one group, to which requests are admitted as by a manager."""

    def __init__(self, *, num_blocks=20, enable_caching=True, group_block_sizes=None):
        self.hasher = BlockHasher(block_size=BLOCK_SIZE, seed="s")
        self.pool = BlockPool(
            num_blocks=num_blocks, enable_caching=enable_caching, hash_block_size=BLOCK_SIZE
        )
        self.explainer = PrefixCacheMissExplainer(
            block_pool=self.pool,
            groups=[
                PrefixGroup(group_id, block_size, lambda num_computed_tokens: 0)
                for group_id, block_size in (group_block_sizes or {0: BLOCK_SIZE}).items()
            ],
            hash_block_size=BLOCK_SIZE,
        )

    def request(self, request_id, token_ids, *, salt=None, lora=None, skip=False, **sources):
        block_hashes = []
        keys = ExtraKeySources(cache_salt=salt, lora_name=lora, **sources)
        self.hasher.extend(block_hashes, token_ids, keys)
        return types.SimpleNamespace(
            request_id=request_id,
            all_token_ids=token_ids,
            num_tokens=len(token_ids),
            num_preemptions=0,
            block_hashes=block_hashes,
            skip_reading_prefix_cache=skip,
            lora_name=lora,
            cache_salt=salt,
        )

    def num_hit_tokens(self, request):
        if request.skip_reading_prefix_cache:
            return 0
        num_blocks = 0
        while (num_blocks + 1) * BLOCK_SIZE <= request.num_tokens - 1:
            if self.pool.get_cached_block(request.block_hashes[num_blocks], [0]) is None:
                break
            num_blocks += 1
        return num_blocks * BLOCK_SIZE

    def admit(self, request):
        """Looks up, records, allocates and caches; returns the blocks."""
        num_hit_tokens = self.num_hit_tokens(request)
        self.explainer.record(request, num_hit_tokens)
        num_hits, num_full = num_hit_tokens // BLOCK_SIZE, request.num_tokens // BLOCK_SIZE
        hits = [self.pool.get_cached_block(h, [0])[0] for h in request.block_hashes[:num_hits]]
        self.pool.touch(hits)
        blocks = hits + self.pool.get_new_blocks(num_full - num_hits)
        if self.pool.enable_caching:
            self.pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=num_hits,
                num_full_blocks=num_full,
                block_size=BLOCK_SIZE,
                kv_cache_group_id=0,
            )
        return blocks

    def why(self, request_id):
        answer = self.explainer.answer(request_id)
        assert answer.request_id == request_id
        return answer.reason, answer.num_hit_tokens, answer.block_idx


def test_a_full_hit_excludes_the_last_token():
    cache = Cache()
    cache.admit(cache.request("a", [1, 2, 3, 4]))
    for request_id, tokens in (("b", [1, 2, 3, 4]), ("c", [1, 2, 3])):
        cache.admit(cache.request(request_id, tokens))
        assert cache.why(request_id) == ("hit", 2, None)
    cache.admit(cache.request("d", [1, 2, 3, 4, 5]))
    assert cache.why("d") == ("hit", 4, None)


def test_the_first_differing_block_is_named():
    cache = Cache()
    cache.admit(cache.request("a", [1, 2, 3, 4, 5, 6]))
    cache.admit(cache.request("b", [1, 2, 3, 4, 5, 9, 7]))
    assert cache.why("a") == ("first_block_differs", 0, 0)
    assert cache.why("b") == ("block_differs", 4, 2)
    assert cache.explainer.answer("b").block_size == BLOCK_SIZE
    cache.admit(cache.request("c", [9, 2, 3, 4]))
    assert cache.why("c") == ("first_block_differs", 0, 0)


def test_a_different_salt_and_a_different_adapter_are_distinguished():
    cache = Cache()
    tokens = [1, 2, 3, 4, 5]
    cache.admit(cache.request("plain", tokens))
    cases = [
        ("salted", {"salt": "s"}, "salt"),
        ("other salt", {"salt": "t"}, "salt"),
        ("adapted", {"lora": "l"}, "lora"),
        ("both", {"lora": "l", "salt": "s"}, "lora"),  # salt s is cached, with another adapter
        ("again", {"lora": "l", "salt": "s"}, "hit"),
        ("new salt, new adapter", {"lora": "m", "salt": "u"}, "salt"),
    ]
    for request_id, names, reason in cases:
        cache.admit(cache.request(request_id, tokens, **names))
        assert cache.why(request_id)[0] == reason, request_id


def test_a_salt_whose_blocks_were_evicted_is_not_a_reason():
    cache = Cache()
    cache.pool.evict(cache.admit(cache.request("a", [1, 2, 3], salt="s")))
    cache.admit(cache.request("b", [1, 2, 3]))
    assert cache.why("b") == ("first_block_differs", 0, 0)


def test_an_evicted_block_is_reported_as_evicted():
    cache = Cache(num_blocks=5)
    cache.pool.free_blocks(reversed(cache.admit(cache.request("a", [1, 2, 3, 4, 5, 6]))))
    cache.pool.free_blocks(cache.pool.get_new_blocks(2))  # the unused block, and the tail of a
    cache.admit(cache.request("b", [1, 2, 3, 4, 5, 6, 7]))
    assert cache.why("b") == ("evicted", 4, 2)


def test_a_later_eviction_does_not_explain_an_earlier_miss():
    cache = Cache()
    cache.admit(cache.request("a", [1, 2, 3, 4]))
    request = cache.request("b", [1, 2, 5, 6, 7])
    blocks = cache.admit(request)
    cache.pool.evict(blocks)
    assert cache.why("b") == ("block_differs", 2, 1)
    cache.admit(cache.request("c", [1, 2, 5, 6, 7]))
    assert cache.why("c") == ("evicted", 0, 0)


def test_short_prompts_and_disabled_reading_have_their_own_reasons():
    cache = Cache()
    cache.admit(cache.request("short", [1, 2]))
    assert cache.why("short") == ("too_short", 0, None)
    cache.admit(cache.request("skip", [1, 2, 3, 4], skip=True))
    assert cache.why("skip") == ("disabled", 0, None)
    cache = Cache(enable_caching=False)
    cache.admit(cache.request("off", [1, 2, 3, 4]))
    assert cache.why("off") == ("disabled", 0, None)


def test_a_block_missing_in_one_group_is_not_a_different_prompt():
    cache = Cache(group_block_sizes={0: 2, 1: 4})
    request = cache.request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.admit(request)  # into group 0 alone
    answer = cache.explainer.explain(request, 0)
    assert (answer.reason, answer.block_idx, answer.block_size) == ("shortened", 0, 4)
    cache.pool.cache_full_blocks(
        request=request,
        blocks=cache.pool.get_new_blocks(2),
        num_cached_blocks=0,
        num_full_blocks=2,
        block_size=4,
        kv_cache_group_id=1,
    )
    assert cache.explainer.explain(request, 8).reason == "hit"
    # All blocks are cached, but the hit was shortened, as for speculative decoding.
    assert cache.explainer.explain(request, 4).reason == "shortened"
    # A hit is at least one block of the larger group.
    assert cache.explainer.explain(cache.request("b", [1, 2, 3, 4]), 0).reason == "too_short"


def test_explain_records_nothing():
    cache = Cache()
    request = cache.request("a", [1, 2, 3, 4])
    assert cache.explainer.explain(request, 0).reason == "first_block_differs"
    assert cache.explainer.answer("a") is None


def test_a_resumed_request_keeps_the_answer_of_its_first_admission():
    cache = Cache()
    request = cache.request("a", [1, 2, 3, 4, 5])
    cache.pool.free_blocks(cache.admit(request))
    request.num_preemptions = 1
    cache.admit(request)
    assert cache.why("a") == ("first_block_differs", 0, 0)


def test_a_reset_clears_evicted_hashes():
    cache = Cache()
    blocks = cache.admit(cache.request("a", [1, 2, 3, 4]))
    cache.pool.evict(blocks)
    cache.pool.free_blocks(blocks)
    assert cache.pool.reset_prefix_cache()
    cache.admit(cache.request("b", [1, 2, 3, 4]))
    assert cache.why("b") == ("first_block_differs", 0, 0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_cache_miss, "MAX_ANSWERS", 3)
    monkeypatch.setattr(prefix_cache_miss, "MAX_FIRST_BLOCKS", 2)
    cache = Cache(num_blocks=40)
    for number in range(5):
        cache.admit(cache.request(f"r{number}", [number, 0, 0]))
    assert [cache.explainer.answer(f"r{number}") is None for number in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    for number, reason in ((0, "first_block_differs"), (4, "salt")):
        request = cache.request("x", [number, 0, 0], salt="s")
        assert cache.explainer.explain(request, 0).reason == reason
    # Many salts with one prompt: the latest are remembered.
    for number in range(20):
        cache.admit(cache.request(f"s{number}", [7, 7, 7], salt=str(number)))
    assert cache.why("s19")[0] == "salt"


def explain(manager, request):
    answer = manager.explain_miss(request)
    return answer.reason, answer.num_hit_tokens, answer.block_idx


def evict(manager, request, group_id, block_idxs):
    blocks = manager.coordinator.get_blocks(request.request_id)[group_id]
    manager.evict_blocks([blocks[block_idx].block_id for block_idx in block_idxs])


@pytest.mark.parametrize("specs", [(window(8), full()), (full(), window(8))])
def test_missing_window_blocks_are_named_at_the_end_of_the_known_prefix(specs):
    manager = make_manager(*specs, num_blocks=40)
    window_id = specs.index(window(8))
    first = run_alone(manager, "first", range(33))
    # The first 28 tokens are the same. A hit of 28 needs blocks 5 and 6 of the window.
    request = FakeRequest("second", [*range(28), 99, 98, 97, 96, 95])
    assert explain(manager, request) == ("block_differs", 28, 7)
    evict(manager, first, window_id, [6])
    assert explain(manager, request) == ("evicted", 24, 6)
    evict(manager, first, window_id, [0, 1, 2, 3, 4, 5])
    assert explain(manager, request) == ("evicted", 0, 6)
    manager.block_pool.evicted_hashes.clear()
    assert explain(manager, request) == ("shortened", 0, 6)


def test_with_windows_only_a_block_differs_if_no_later_block_is_cached():
    manager = make_manager(window(8), window(12), num_blocks=40)
    first = run_alone(manager, "first", range(33))
    request = FakeRequest("second", [*range(16), *range(50, 67)])
    assert explain(manager, request) == ("block_differs", 16, 4)
    other = FakeRequest("other", range(50, 83))
    assert explain(manager, other) == ("first_block_differs", 0, 0)
    # Block 3 of the second window is still cached, so the first 16 tokens are known.
    evict(manager, first, 0, [0, 1, 2, 3])
    assert explain(manager, request) == ("evicted", 0, 3)
    # No group knows any of the tokens now.
    evict(manager, first, 1, [0, 1, 2, 3])
    manager.block_pool.evicted_hashes.clear()
    assert explain(manager, request) == ("first_block_differs", 0, 0)


def test_salts_are_compared_even_if_a_window_freed_the_first_block():
    manager = make_manager(window(8), full(), num_blocks=40)
    first = run_alone(manager, "first", range(33), salt="a")
    evict(manager, first, 0, [0])
    assert explain(manager, FakeRequest("second", range(33), salt="b")) == ("salt", 0, 0)


GROUPS = [
    (full(), full(8)),
    (window(8), full()),
    (chunked(8), window(6), full(8)),
    (window(8), window(5)),
]


@quick(200)
@given(st.sampled_from(GROUPS), st.integers(0, 33), st.data())
def test_the_named_block_is_missing_and_differs_in_every_group(specs, shared, data):
    manager = make_manager(*specs, num_blocks=80, hash_block_size=4)
    first = run_alone(manager, "first", range(33))
    for group_id, blocks in enumerate(manager.coordinator.get_blocks("first")):
        gone = data.draw(st.sets(st.integers(0, len(blocks) - 1)))
        evict(manager, first, group_id, gone)
    manager.block_pool.evicted_hashes.clear()
    request = FakeRequest("second", [*range(shared), *range(50, 83 - shared)])
    answer = manager.explain_miss(request)
    if answer.block_idx is None:
        assert answer.reason in ("hit", "shortened", "too_short")
        return
    end = (answer.block_idx + 1) * answer.block_size
    assert answer.num_hit_tokens < end <= request.num_tokens
    cached = [
        manager.block_pool.get_cached_block(hashes[end // size - 1], (group_id,)) is not None
        for group_id, size in enumerate(spec.block_size for spec in specs)
        if end % size == 0
        for hashes in [with_block_size(request.block_hashes, 4, size)]
    ]
    assert not all(cached)
    if answer.reason in ("block_differs", "first_block_differs"):
        assert not any(cached)
