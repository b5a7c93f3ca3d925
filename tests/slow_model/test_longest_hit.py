"""The longest prefix hit against the definition of each kind of attention.

Any set of blocks may be in the cache, also sets that no requests leave behind. The definition
says which lengths can be reused; the manager must find the longest of them.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.kv_cache.hashing.block_hash import BlockHasher
from paxkv.kv_cache.manager import KVCacheManager
from tests.slow_model.attention_kinds import Kind, longest_hit, num_skipped_blocks
from tests.slow_model.manager_machine import RealRequest
from tests.slow_model.slow_request import SlowRequest
from tests.slow_model.specs import chunk, full, make_config, window
from tests.slow_model.state_machine_settings import long, quick

MAX_TOKENS = 26

ONE_KIND = [
    full(2),
    window(2, 2),
    window(3, 2),
    window(4, 2),
    window(5, 2),
    window(8, 2),
    window(6, 4),
    chunk(2, 2),
    chunk(4, 2),
    chunk(6, 2),
    chunk(8, 4),
]
SEVERAL_KINDS = [
    (full(2), window(3, 2)),
    (full(2), window(6, 2)),
    (window(4, 2), full(2)),
    (full(4), window(5, 2)),
    (full(2), window(5, 4)),
    (full(2), window(3, 2), window(7, 2)),
    (full(2), window(3, 2), window(7, 4)),
    (window(4, 2), window(7, 2)),
    (window(4, 2), window(6, 4)),
    (full(2), chunk(4, 2)),
    (full(2), chunk(6, 2)),
    (full(2), chunk(4, 2), window(4, 2)),
    (full(2), full(4)),
    (full(2), full(2)),
]


def fill_cache(manager, real, kinds, is_cached):
    """Caches exactly the given (group, block index) pairs; returns their block ids."""
    pool = manager.block_pool
    block_ids, blocks = {}, []
    for group, i in sorted(is_cached):
        (block,) = pool.get_new_blocks(1)
        pool.cache_full_blocks(
            request=real,
            blocks=[pool.null_block] * i + [block],
            num_cached_blocks=i,
            num_full_blocks=i + 1,
            block_size=kinds[group].block_size,
            kv_cache_group_id=group,
        )
        block_ids[group, i] = block.block_id
        blocks.append(block)
    pool.free_blocks(blocks)
    return block_ids


def check(kinds, num_tokens, holes, use_eagle):
    """Checks the longest hit when every block except `holes` is cached."""
    every_block = {
        (group, i) for group, kind in enumerate(kinds) for i in range(num_tokens // kind.block_size)
    }
    is_cached = every_block - {(group, i) for group, i in holes}
    config = make_config(kinds, 2 + len(every_block))
    manager = KVCacheManager(
        kv_cache_config=config, max_model_len=MAX_TOKENS + 2, use_eagle=use_eagle
    )
    slow = SlowRequest(
        request_id="r",
        tokens=list(range(num_tokens)),
        num_prompt=num_tokens,
        scope=None,
        max_tokens=MAX_TOKENS + 2,
    )
    hasher = BlockHasher(block_size=config.resolved_hash_block_size, seed="test")
    real = RealRequest(slow, hasher)
    block_ids = fill_cache(manager, real, kinds, is_cached)
    found, num_found = manager.get_computed_blocks(real)
    expected = longest_hit(
        kinds, num_tokens - 1, lambda group, i: (group, i) in is_cached, use_eagle=use_eagle
    )
    assert num_found == expected
    tables = found.get_block_ids()
    for group, kind in enumerate(kinds):
        left = num_skipped_blocks(kind, num_found)
        num_blocks = num_found // kind.block_size
        assert tables[group] == [0 if i < left else block_ids[group, i] for i in range(num_blocks)]


def holes(num_groups):
    pair = st.tuples(st.integers(0, num_groups - 1), st.integers(0, MAX_TOKENS // 2))
    return st.lists(pair, max_size=8, unique=True)


@pytest.mark.parametrize("kind", ONE_KIND, ids=str)
@quick(16)
@given(num_tokens=st.integers(1, MAX_TOKENS), data=st.data(), use_eagle=st.booleans())
def test_one_group_finds_the_longest_hit(kind: Kind, num_tokens, data, use_eagle):
    check((kind,), num_tokens, data.draw(holes(1)), use_eagle)


@pytest.mark.parametrize("kinds", SEVERAL_KINDS, ids=lambda kinds: "+".join(map(str, kinds)))
@quick(16)
@given(num_tokens=st.integers(1, MAX_TOKENS), data=st.data(), use_eagle=st.booleans())
def test_several_groups_find_the_longest_common_hit(kinds, num_tokens, data, use_eagle):
    check(kinds, num_tokens, data.draw(holes(len(kinds))), use_eagle)


@pytest.mark.slow
@long(20_000)
@given(
    kinds=st.sampled_from([*((kind,) for kind in ONE_KIND), *SEVERAL_KINDS]),
    num_tokens=st.integers(1, MAX_TOKENS),
    data=st.data(),
    use_eagle=st.booleans(),
)
def test_the_longest_hit_for_long(kinds, num_tokens, data, use_eagle):
    check(kinds, num_tokens, data.draw(holes(len(kinds))), use_eagle)
