"""DeviceBlockWork: copies that can be made all at once, each drained once."""

from paxkv.kv_cache.managers.device_block_work import DeviceBlockWork
from paxkv.kv_cache.pool.block import KVCacheBlock


def blocks(num):
    return [KVCacheBlock(i, ref_cnt=1) for i in range(num)]


def taken(work):
    return [(copy.source_block_id, copy.target_block_id) for copy in work.drain_copies()]


def test_copies_are_drained_once_in_order():
    b = blocks(6)
    work = DeviceBlockWork()
    work.record_copy(b[3], b[1])
    work.record_copy(b[3], b[4])
    assert taken(work) == [(3, 1), (3, 4)]
    assert taken(work) == []


def test_a_copy_of_a_copy_reads_the_original_source():
    b = blocks(6)
    work = DeviceBlockWork()
    work.record_copy(b[1], b[2])
    work.record_copy(b[2], b[3])
    work.record_copy(b[3], b[4])
    assert taken(work) == [(1, 2), (1, 3), (1, 4)]
    # In the next step, block 2 has its own content.
    work.record_copy(b[2], b[5])
    assert taken(work) == [(2, 5)]


def test_a_copy_into_a_freed_block_is_dropped():
    b = blocks(4)
    work = DeviceBlockWork()
    work.record_copy(b[1], b[2])
    work.record_copy(b[1], b[3])
    b[2].ref_cnt = 0
    work.drop_freed_targets()
    assert taken(work) == [(1, 3)]


def test_a_copy_of_a_block_to_itself_is_dropped():
    b = blocks(4)
    work = DeviceBlockWork()
    work.record_copy(b[1], b[2])
    work.record_copy(b[2], b[1])
    assert taken(work) == [(1, 2)]
