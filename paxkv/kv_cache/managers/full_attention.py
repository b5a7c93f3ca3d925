"""FullAttentionManager: every token attends to all earlier ones, so every block is kept."""

from collections.abc import Sequence
from itertools import islice

from paxkv.contracts.kv_cache_spec import KVCacheSpec
from paxkv.kv_cache.hashing.block_hash import BlockHash
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool


class FullAttentionManager(SingleTypeKVCacheManager):
    """Block tables of full attention layers, including multi-head latent attention (MLA)."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        *,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        block_size = kv_cache_spec.block_size
        num_blocks = max_length // block_size
        computed_blocks: list[list[KVCacheBlock]] = []
        # The search goes from left to right. A gap ends the hit, because later tokens attend to
        # the tokens in the gap.
        for group_id in kv_cache_group_ids:
            run = block_pool.get_cached_run(islice(block_hashes, num_blocks), group_id)
            computed_blocks.append(run)
            num_blocks = len(run)
        if use_eagle and num_blocks > 0:
            num_blocks -= 1
        while num_blocks * block_size % alignment_tokens:
            num_blocks -= 1
        for computed in computed_blocks:
            del computed[num_blocks:]
        return tuple(computed_blocks)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        num_common_blocks = 0
        for block in self.get_blocks(running_request_id):
            if block.ref_cnt != len(self.req_to_blocks):
                break
            num_common_blocks += 1
        return num_common_blocks
