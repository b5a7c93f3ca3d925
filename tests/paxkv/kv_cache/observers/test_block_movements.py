"""A pool with a movement log reports every movement of a block, in order."""

import pytest

from paxkv.kv_cache.observers.block_movements import BlockMovementLog, BlockMovements
from paxkv.kv_cache.pool.block_pool import BlockPool


class Hashed:
    """As much of a request as caching its blocks asks for."""

    block_hashes = (b"first", b"second")


@pytest.fixture
def log() -> BlockMovementLog:
    return BlockMovementLog()


@pytest.fixture
def pool(log: BlockMovementLog) -> BlockPool:
    return BlockPool(num_blocks=4, enable_caching=True, observers=[log])


def test_life_of_a_block_is_reported_in_order(pool: BlockPool, log: BlockMovementLog) -> None:
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
    pool.free_blocks(reversed(blocks))  # block 1 has another holder still
    assert log.drain() == BlockMovements(shared=[1], freed=[2])
    pool.free_blocks(blocks[:1])
    # Block 3 was never used; then the one that was freed first.
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


def test_null_blocks_do_not_move(pool: BlockPool, log: BlockMovementLog) -> None:
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert log.drain() == BlockMovements()
