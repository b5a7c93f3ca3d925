"""WindowedManager: base class for attention whose later tokens do not read early tokens."""

from abc import abstractmethod
from collections.abc import Sequence

from paxkv.contracts.kv_cache_spec import KVCacheSpec
from paxkv.kv_cache.hashing.block_hash import BlockHash
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool


class WindowedManager(SingleTypeKVCacheManager):
    """Block tables that begin with null blocks in place of blocks that are no longer read."""

    @classmethod
    @abstractmethod
    def num_skipped_tokens(cls, kv_cache_spec: KVCacheSpec, num_computed_tokens: int) -> int:
        """See `get_num_skipped_tokens`. The result never decreases with `num_computed_tokens`."""

    @abstractmethod
    def get_num_tokens_skipping(self, num_blocks: int) -> int:
        """Smallest `num_computed_tokens` at which the first `num_blocks` blocks are not needed."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return self.num_skipped_tokens(self.kv_cache_spec, num_computed_tokens)

    def get_num_blocks_for_full_sequence(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_new_tokens: int,
    ) -> int:
        # `max_held_blocks` is the largest number of blocks that the request holds at once.
        return min(
            super().get_num_blocks_for_full_sequence(
                request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_new_tokens
            ),
            self.kv_cache_spec.max_held_blocks(
                max_model_len=num_tokens, max_num_batched_tokens=num_new_tokens
            ),
        )

    def get_max_tokens_before_allocate(
        self, request_id: str, *, are_cached_late: bool = False
    ) -> int:
        num_tokens = super().get_max_tokens_before_allocate(
            request_id, are_cached_late=are_cached_late
        )
        num_skipped = self.num_skipped_blocks.get(request_id, 0)
        # At least one token is new, so the number of computed tokens is below this limit.
        num_tokens_skipping = self.get_num_tokens_skipping(num_skipped + 1)
        return num_tokens if num_tokens < num_tokens_skipping else num_tokens_skipping

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
        """See the base class. Searches from right to left: only the last blocks are needed."""
        block_size = kv_cache_spec.block_size
        num_dropped = 1 if use_eagle else 0
        end = min(max_length // block_size, len(block_hashes))
        while end > num_dropped:
            num_tokens = (end - num_dropped) * block_size
            if num_tokens % alignment_tokens:
                end -= 1
                continue
            first = cls.num_skipped_tokens(kv_cache_spec, num_tokens) // block_size
            run: list[list[KVCacheBlock]] = []
            for block_idx in range(end - 1, first - 1, -1):
                cached_blocks = block_pool.get_cached_block(
                    block_hashes[block_idx], kv_cache_group_ids
                )
                if cached_blocks is None:
                    # Every hit that ends to the right of the gap would need the missing block.
                    end = block_idx
                    break
                run.append(cached_blocks)
            else:
                needed = run[num_dropped:][::-1]
                return tuple(
                    [block_pool.null_block] * first + [cached_blocks[i] for cached_blocks in needed]
                    for i in range(len(kv_cache_group_ids))
                )
        return tuple([] for _ in kv_cache_group_ids)
