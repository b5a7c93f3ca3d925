"""The free queue: order, O(1) removal from the middle, and errors."""

import pytest

from paxkv.errors import InvariantError
from paxkv.kv_cache.pool.block import FreeKVCacheBlockQueue, KVCacheBlock


def make_queue(num_blocks):
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def free_ids(queue):
    return [block.block_id for block in queue.get_all_free_blocks()]


def test_blocks_leave_the_queue_in_the_order_of_insertion():
    blocks, queue = make_queue(4)
    assert queue.popleft() is blocks[0]
    assert queue.popleft_n(2) == [blocks[1], blocks[2]]
    queue.append(blocks[2])
    queue.append_n([blocks[0], blocks[1]])
    assert free_ids(queue) == [3, 2, 0, 1]
    assert queue.num_free_blocks == 4


def test_remove_takes_a_block_from_front_middle_and_end():
    blocks, queue = make_queue(5)
    for block_id, rest in ((2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3])):
        queue.remove(blocks[block_id])
        assert free_ids(queue) == rest
        assert queue.num_free_blocks == len(rest)
        assert blocks[block_id].prev_free_block is None
        assert blocks[block_id].next_free_block is None


def test_a_queue_can_run_empty_and_fill_again():
    blocks, queue = make_queue(2)
    assert queue.popleft_n(2) == blocks
    assert queue.popleft_n(0) == []
    assert free_ids(queue) == []
    queue.append_n([])
    queue.append(blocks[1])
    assert free_ids(queue) == [1]
    assert FreeKVCacheBlockQueue([]).num_free_blocks == 0


def test_popping_too_many_blocks_raises_and_pops_nothing():
    _, queue = make_queue(2)
    with pytest.raises(InvariantError, match="num_blocks=3"):
        queue.popleft_n(3)
    assert free_ids(queue) == [0, 1]
    queue.popleft_n(2)
    with pytest.raises(InvariantError):
        queue.popleft()


def test_appending_or_removing_a_block_twice_raises():
    blocks, queue = make_queue(2)
    with pytest.raises(InvariantError, match="already"):
        queue.append(blocks[1])
    queue.remove(blocks[0])
    with pytest.raises(InvariantError, match="not in the free queue"):
        queue.remove(blocks[0])


def test_the_error_names_the_block_that_was_appended_twice():
    blocks, queue = make_queue(2000)
    with pytest.raises(InvariantError) as refusal:
        queue.append(blocks[1000])
    assert len(str(refusal.value)) < 200


def test_get_first_returns_the_next_blocks_in_order():
    blocks, queue = make_queue(3)
    queue.append(queue.popleft())
    assert queue.get_first(2) == [blocks[1], blocks[2]]
    assert queue.get_first(9) == [blocks[1], blocks[2], blocks[0]]
    assert free_ids(queue) == [1, 2, 0]
