"""SingleTypeKVCacheManager: the block tables of one KV cache group."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paxkv.contracts.cache_request import CacheRequest
from paxkv.contracts.kv_cache_spec import KVCacheSpec
from paxkv.errors import InvariantError
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.block_hash import BlockHash
from paxkv.kv_cache.block_pool import BlockPool


class SingleTypeKVCacheManager(ABC):
    """Which blocks each request holds in one group; one subclass per type of attention.

    Source: vLLM `v1/core/single_type_kv_cache_manager.py`.
    """

    def __init__(
        self, *, kv_cache_spec: KVCacheSpec, block_pool: BlockPool, kv_cache_group_id: int
    ) -> None:
        self.block_size = kv_cache_spec.block_size
        self.block_pool = block_pool
        self.kv_cache_group_id = kv_cache_group_id
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # How many of a request's first blocks went to the prefix cache, or came from it.
        self.num_cached_blocks: dict[str, int] = {}

    def get_blocks(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The request's block table, empty for one that holds nothing."""
        return self.req_to_blocks.get(request_id, ())

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> int:
        """Free blocks that it takes to give the request room for `num_tokens` tokens.

        Args:
            new_computed_blocks: Its prefix hits. Those that nobody holds leave the free queue
                too, so they count.
        """
        num_required = -(-num_tokens // self.block_size)
        num_present = len(self.get_blocks(request_id)) + len(new_computed_blocks)
        num_free_hits = sum(
            block.ref_cnt == 0 and not block.is_null for block in new_computed_blocks
        )
        return max(num_required - num_present, 0) + num_free_hits

    def allocate_new_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Starts a block table with prefix hits.

        Raises:
            InvariantError: The request has a block table already.
        """
        if not new_computed_blocks:
            return
        if request_id in self.req_to_blocks:
            raise InvariantError(f"prefix hits for {request_id=}, which holds blocks already.")
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id] = list(new_computed_blocks)
        self.num_cached_blocks[request_id] = len(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> Sequence[KVCacheBlock]:
        """Gives the request room for `num_tokens` tokens; returns the new blocks."""
        num_required = -(-num_tokens // self.block_size)
        num_new_blocks = num_required - len(self.get_blocks(request_id))
        if num_new_blocks <= 0:
            return ()
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        self.req_to_blocks.setdefault(request_id, []).extend(new_blocks)
        return new_blocks

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Makes the blocks that the request's first `num_tokens` tokens fill findable."""
        num_cached_blocks = self.num_cached_blocks.get(request.request_id, 0)
        num_full_blocks = num_tokens // self.block_size
        if num_full_blocks <= num_cached_blocks:
            return
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id],
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.num_cached_blocks[request.request_id] = num_full_blocks

    def free(self, request_id: str, num_computed_tokens: int) -> None:
        """Gives up the request's blocks, if it has any.

        Args:
            num_computed_tokens: Tokens that were written, or are being written by a step sent
                off. Blocks are cached when they are allocated; those past these tokens will
                never be written and are withdrawn, or others would hit them.
        """
        blocks = self.req_to_blocks.pop(request_id, None)
        if blocks is None:
            return
        num_cached_blocks = self.num_cached_blocks.pop(request_id, 0)
        self.block_pool.evict(blocks[num_computed_tokens // self.block_size : num_cached_blocks])
        # In reverse, so that the tail of a sequence is evicted before its prefix, which others
        # may share.
        self.block_pool.free_blocks(reversed(blocks))

    @classmethod
    @abstractmethod
    def find_longest_cache_hit(
        cls,
        *,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Cached blocks of the longest prefix that every one of the groups has.

        Args:
            max_length: Most tokens that the hit may have.
            kv_cache_group_ids: Groups with this spec.

        Returns:
            A list of blocks per group, all equally long.
        """

    @abstractmethod
    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Leading blocks that every request holds; `running_request_id` is any of them."""
