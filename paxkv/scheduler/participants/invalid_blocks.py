"""Blocks that could not be loaded: how much of a request is still good, and can be built on."""

from collections.abc import Collection, Sequence

from paxkv.kv_cache.manager import KVCacheManager
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.scheduler.request import Request


def num_valid_tokens(
    manager: KVCacheManager, request: Request, invalid_block_ids: Collection[int]
) -> int | None:
    """Leading tokens before the first invalid block of any group; None where none is invalid."""
    first_tokens = [
        block_idx * block_size
        for blocks, block_size in _tables(manager, request)
        for block_idx, block in enumerate(blocks)
        if block.block_id in invalid_block_ids
    ]
    return min(first_tokens, default=None)


def block_ids_from(manager: KVCacheManager, request: Request, num_tokens: int) -> set[int]:
    """The request's blocks that hold a token at or past `num_tokens`, without the null block."""
    return {
        block.block_id
        for blocks, block_size in _tables(manager, request)
        for block in blocks[num_tokens // block_size :]
        if not block.is_null
    }


def can_go_on_from(manager: KVCacheManager, request: Request, num_tokens: int) -> bool:
    """Whether the request can compute its tokens from `num_tokens` on again, in its own blocks.

    It cannot where others hold one of them, or where a block that left a window is needed again.
    """
    return num_tokens > 0 and not any(
        any(block.is_null for block in blocks)
        or any(block.ref_cnt > 1 for block in blocks[num_tokens // block_size :])
        for blocks, block_size in _tables(manager, request)
    )


def _tables(manager: KVCacheManager, request: Request) -> list[tuple[Sequence[KVCacheBlock], int]]:
    """The request's own blocks in each group, and the group's block size."""
    return [
        (
            group_manager.get_blocks(request.request_id),
            group_manager.block_size,
        )
        for group_manager in manager.coordinator.single_type_managers
    ]
