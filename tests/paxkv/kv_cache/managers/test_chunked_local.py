"""Chunked local attention: a hit needs the blocks of its last chunk; earlier blocks are freed."""

import pytest

from paxkv.kv_cache.hashing.block_hash import make_block_hash_with_group_id
from paxkv.kv_cache.managers.chunked_local import ChunkedLocalAttentionManager
from tests.paxkv.kv_cache.cache_fakes import chunked, ids, make_group

HASHES = [bytes([65 + i]) for i in range(8)]


def make(chunk_size, **settings):
    return make_group(ChunkedLocalAttentionManager, chunked(chunk_size), **settings)


def hit(chunk_size, cached_idxs, max_length, *, use_eagle=False, alignment_tokens=4):
    """Block ids of the hit; block i of the prompt is block i + 1 of the pool, 0 is null."""
    manager = make(chunk_size)
    pool = manager.block_pool
    for idx in cached_idxs:
        key = make_block_hash_with_group_id(HASHES[idx], 0)
        pool.cached_block_hash_to_block.insert(key, pool.blocks[idx + 1])
    (found,) = ChunkedLocalAttentionManager.find_longest_cache_hit(
        block_hashes=HASHES,
        max_length=max_length,
        kv_cache_group_ids=(0,),
        block_pool=pool,
        kv_cache_spec=manager.kv_cache_spec,
        use_eagle=use_eagle,
        alignment_tokens=alignment_tokens,
    )
    return ids(found)


def test_a_hit_needs_only_blocks_of_its_last_chunk():
    # Chunks of 8: 15 tokens end in the chunk 8..15, in which 8..11 is a full block.
    assert hit(8, (2,), 15) == [0, 0, 3]
    assert hit(8, (), 15) == [0, 0]
    assert hit(8, (0, 1, 2, 3), 31) == [0, 0, 0, 0, 0, 0]
    assert hit(16, (0, 1, 2), 15) == [1, 2, 3]
    assert hit(16, (0, 2), 15) == [1]


def test_a_hit_that_ends_with_a_chunk_needs_no_blocks():
    assert hit(8, (), 16) == [0, 0, 0, 0]


def test_a_chunk_that_begins_within_a_block_needs_that_block():
    # Chunks of 6. 12 tokens end with a chunk. At 8 the chunk began at 6, in block 1.
    assert hit(6, (), 15) == [0, 0, 0]
    assert hit(6, (1,), 11) == [0, 2]
    # At 4 the chunk is 0..5: block 0 is needed too.
    assert hit(6, (), 11) == []
    assert hit(6, (0,), 11) == [1]


def test_with_eagle_the_next_block_must_be_cached_and_is_dropped():
    assert hit(8, (2, 3), 31, use_eagle=True) == [0, 0, 3]
    assert hit(8, (4,), 31, use_eagle=True) == [0, 0, 0, 0]
    assert hit(8, (), 31, use_eagle=True) == []


def test_the_end_of_a_hit_is_aligned():
    assert hit(16, (0, 1, 2), 15, alignment_tokens=8) == [1, 2]
    assert hit(8, (6,), 31, alignment_tokens=12) == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("num_computed", "expected"),
    [(7, [1, 2, 3, 4]), (8, [0, 0, 3, 4]), (15, [0, 0, 3, 4]), (16, [0, 0, 0, 0])],
)
def test_blocks_of_earlier_chunks_are_freed(num_computed, expected):
    manager = make(8)
    manager.allocate_new_blocks("r", 16, 16)
    manager.remove_skipped_blocks("r", num_computed)
    assert ids(manager.get_blocks("r")) == expected
    manager.check_invariants()


def test_a_block_of_two_chunks_is_held_until_the_second_ends():
    manager = make(6)
    manager.allocate_new_blocks("r", 16, 16)
    manager.remove_skipped_blocks("r", 6)
    assert ids(manager.get_blocks("r")) == [0, 2, 3, 4]
    manager.remove_skipped_blocks("r", 11)
    assert ids(manager.get_blocks("r")) == [0, 2, 3, 4]
    manager.remove_skipped_blocks("r", 12)
    assert ids(manager.get_blocks("r")) == [0, 0, 0, 4]


def test_max_tokens_before_allocate_ends_with_the_chunk():
    manager = make(8, enable_caching=False)
    manager.allocate_new_blocks("r", 16, 16)
    assert manager.get_max_tokens_before_allocate("r") == 8
    manager.remove_skipped_blocks("r", 8)
    assert manager.get_max_tokens_before_allocate("r") == 16
