"""A pool with a movement log reports every movement of a block, in order."""

import pytest

from paxkv.kv_cache.observers.block_movements import BlockMovementLog, BlockMovements
from paxkv.kv_cache.pool.block_pool import BlockPool


class Hashed:
    """A request with only the fields that caching needs."""

    block_hashes = (b"first", b"second")


@pytest.fixture
def log() -> BlockMovementLog:
    return BlockMovementLog()


@pytest.fixture
def pool(log: BlockMovementLog) -> BlockPool:
    return BlockPool(num_blocks=4, enable_caching=True, observers=[log])


def test_movements_of_a_block_are_reported_in_order(pool: BlockPool, log: BlockMovementLog) -> None:
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(
        request=Hashed(),
        blocks=blocks,
        num_cached_blocks=0,
        num_full_blocks=2,
        block_size=8,
        kv_cache_group_id=0,
    )
    assert log.drain() == BlockMovements(allocated=[1, 2], cached=[1, 2])
    pool.touch(blocks[:1])
    pool.free_blocks(reversed(blocks))  # block 1 still has another holder
    assert log.drain() == BlockMovements(shared=[1], freed=[2])
    pool.free_blocks(blocks[:1])
    # First block 3, which was never used, and then the block that was freed first.
    pool.get_new_blocks(2)
    assert log.drain() == BlockMovements(freed=[1], allocated=[3, 2], evicted=[2])
    assert log.drain() == BlockMovements()


def test_reset_evicts_what_is_cached(pool: BlockPool, log: BlockMovementLog) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(
        request=Hashed(),
        blocks=[block],
        num_cached_blocks=0,
        num_full_blocks=1,
        block_size=8,
        kv_cache_group_id=0,
    )
    pool.free_blocks([block])
    log.drain()
    assert pool.reset_prefix_cache()
    assert log.drain() == BlockMovements(evicted=[1])


def test_null_blocks_are_not_reported(pool: BlockPool, log: BlockMovementLog) -> None:
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert log.drain() == BlockMovements()
