"""FullAttentionManager: every token attends to all earlier ones, so every block is kept."""

from collections.abc import Sequence

from paxkv.contracts.kv_cache_spec import KVCacheSpec
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.block_hash import BlockHash
from paxkv.kv_cache.block_pool import BlockPool
from paxkv.kv_cache.single_type_manager import SingleTypeKVCacheManager


class FullAttentionManager(SingleTypeKVCacheManager):
    """Block tables of full attention layers."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        *,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
    ) -> tuple[list[KVCacheBlock], ...]:
        computed_blocks: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        max_num_blocks = min(max_length // kv_cache_spec.block_size, len(block_hashes))
        for block_idx in range(max_num_blocks):
            cached_blocks = block_pool.get_cached_block(block_hashes[block_idx], kv_cache_group_ids)
            # A gap ends the hit: tokens after it would need K and V of the tokens in it.
            if cached_blocks is None:
                break
            for computed, cached in zip(computed_blocks, cached_blocks, strict=True):
                computed.append(cached)
        return computed_blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        num_common_blocks = 0
        for block in self.get_blocks(running_request_id):
            if block.ref_cnt != len(self.req_to_blocks):
                break
            num_common_blocks += 1
        return num_common_blocks
