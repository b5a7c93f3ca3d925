"""Blocks that could not be loaded: how many tokens of a request remain valid."""

from collections.abc import Collection, Sequence

from paxkv.kv_cache.manager import KVCacheManager
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.scheduler.request import Request


def num_valid_tokens(
    manager: KVCacheManager, request: Request, invalid_block_ids: Collection[int]
) -> int | None:
    """Number of tokens before the first invalid block of any group; None if no block is invalid."""
    first_tokens = [
        block_idx * block_size
        for blocks, block_size in _tables(manager, request)
        for block_idx, block in enumerate(blocks)
        if block.block_id in invalid_block_ids
    ]
    return min(first_tokens, default=None)


def block_ids_from(manager: KVCacheManager, request: Request, num_tokens: int) -> set[int]:
    """Ids of the request's blocks that hold a token at or past `num_tokens`, except null blocks."""
    return {
        block.block_id
        for blocks, block_size in _tables(manager, request)
        for block in blocks[num_tokens // block_size :]
        if not block.is_null
    }


def can_continue_from(manager: KVCacheManager, request: Request, num_tokens: int) -> bool:
    """Whether the request can recompute its tokens from `num_tokens` on in the blocks it holds.

    It cannot if another request holds one of these blocks. It cannot either if one of its blocks
    has left a window, because the tokens of that block may be needed again.
    """
    return num_tokens > 0 and not any(
        any(block.is_null for block in blocks)
        or any(block.ref_cnt > 1 for block in blocks[num_tokens // block_size :])
        for blocks, block_size in _tables(manager, request)
    )


def _tables(manager: KVCacheManager, request: Request) -> list[tuple[Sequence[KVCacheBlock], int]]:
    """The request's own blocks in each group that holds tokens, and the group's block size."""
    return [
        (
            group_manager.get_blocks(request.request_id),
            group_manager.block_size,
        )
        for group_manager in manager.coordinator.single_type_managers
        if group_manager.holds_tokens
    ]
