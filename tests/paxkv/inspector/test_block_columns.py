"""Columns hold what JavaScript's typed arrays read: little-endian, cut off at their width."""

from paxkv.inspector.block_columns import make_columns, u32
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.block_changes import BlockChangeLog


def test_numbers_are_little_endian_and_cut_off():
    assert u32([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    held = KVCacheBlock(7, ref_cnt=70_000)
    cached = KVCacheBlock(9, block_hash=bytes(range(1, 33)) + bytes([0, 0, 0, 3]))
    log = BlockChangeLog()
    log.num_hits[9] = 513
    columns = make_columns([held, cached], log, is_all=False)
    assert columns.block_ids == bytes([7, 0, 0, 0, 9, 0, 0, 0])
    assert columns.ref_counts == bytes([255, 255, 0, 0])
    assert columns.hashes == bytes(6) + bytes([1, 2, 3, 4, 5, 6])
    assert (columns.groups, columns.num_hits) == (bytes([0, 3]), bytes([0, 0, 1, 2]))
    assert make_columns([], log, is_all=False).ref_counts == b""
