"""Columns have the format of JavaScript's typed arrays."""

import numpy as np

from paxkv.inspector.block_columns import make_columns
from paxkv.kv_cache.observers.block_changes import BlockChangeLog
from paxkv.kv_cache.pool.block import KVCacheBlock


def test_numbers_are_little_endian_and_limited_to_their_width():
    blocks = [KVCacheBlock(block_id) for block_id in range(259)]
    blocks[258] = KVCacheBlock(258, ref_cnt=70_000)
    blocks[9] = KVCacheBlock(9, block_hash=bytes(range(1, 33)) + bytes([0, 0, 0, 3]))
    log = BlockChangeLog(blocks)
    log.num_hits[9] = 513
    columns = make_columns(log, np.array([9, 258]))
    assert columns.block_ids == bytes([9, 0, 0, 0, 2, 1, 0, 0])
    assert columns.ref_counts == bytes([0, 0, 255, 255])
    assert columns.hashes == bytes([1, 2, 3, 4, 5, 6]) + bytes(6)
    assert (columns.groups, columns.num_hits) == (bytes([3, 0]), bytes([1, 2, 0, 0]))
    every = make_columns(log, None)
    assert every.block_ids is None and len(every.parents) == 259 * 6
    assert every.hashes[9 * 6 :][:12] == columns.hashes
    nothing = make_columns(log, log.drain_changed([]))
    assert nothing.ref_counts == nothing.block_ids == b""
