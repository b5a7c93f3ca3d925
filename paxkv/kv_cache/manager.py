"""KVCacheManager: the scheduler's door to KV memory: prefix hits, room for tokens, freeing."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

from paxkv.contracts.cache_request import CacheRequest
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.errors import InvariantError
from paxkv.kv_cache.coordinator import GroupBlocks, get_kv_cache_coordinator
from paxkv.kv_cache.stats import PrefixCacheStats


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of one request: `blocks[group][i]` is its i-th block in that KV cache group."""

    blocks: GroupBlocks

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Physical block ids, a list per group."""
        return tuple([block.block_id for block in group] for group in self.blocks)

    def is_empty(self) -> bool:
        return not any(self.blocks)


class KVCacheManager:
    """Gives requests blocks of KV memory and takes them back.

    Source: vLLM `v1/core/kv_cache_manager.py`.
    """

    def __init__(
        self, *, kv_cache_config: KVCacheConfig, max_model_len: int, enable_caching: bool = True
    ) -> None:
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.coordinator = get_kv_cache_coordinator(kv_cache_config, enable_caching=enable_caching)
        self.block_pool = self.coordinator.block_pool
        # The coordinator has checked that all groups have the same.
        self.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.prefix_cache_stats = PrefixCacheStats()
        # Most steps of most requests need no new block: one object serves them all.
        self.empty_kv_cache_blocks = KVCacheBlocks(
            tuple(() for _ in range(self.num_kv_cache_groups))
        )

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, in [0, 1]."""
        return self.block_pool.get_usage()

    def get_computed_blocks(self, request: CacheRequest) -> tuple[KVCacheBlocks, int]:
        """Cached blocks that start with the request's tokens, and how many tokens they hold.

        Nothing is taken yet: the blocks go to `allocate_slots` before anything else does.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        # The last token is always computed: its logits give the next one. A hit consists of
        # whole blocks, so this may cost a block.
        blocks, num_computed_tokens = self.coordinator.find_longest_cache_hit(
            request.block_hashes, max_cache_hit_length=request.num_tokens - 1
        )
        if num_computed_tokens == 0:
            return self.empty_kv_cache_blocks, 0
        return KVCacheBlocks(blocks), num_computed_tokens

    def allocate_slots(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> KVCacheBlocks | None:
        """Gives the request room for its next tokens.

            | computed | new computed | new | lookahead |
            |  blocks  | prefix hits  |   new blocks    |
            |       cached, where full      |

        Args:
            num_new_tokens: Tokens to compute in this step, at least 1.
            num_new_computed_tokens: Tokens of the prefix hits in `new_computed_blocks`.
            new_computed_blocks: What `get_computed_blocks` found; not None exactly when the
                request is being admitted.
            num_lookahead_tokens: Slots beyond the new tokens, for tokens not yet known.
            delay_cache_blocks: Leaves caching to a later `cache_blocks`.

        Returns:
            The new blocks, without the prefix hits. None means that there is no room, so
            preempt; then nothing has changed.
        """
        if num_new_tokens < 1:
            raise InvariantError(f"{num_new_tokens=} must be at least 1.")
        hits = self.empty_kv_cache_blocks if new_computed_blocks is None else new_computed_blocks
        num_main_tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        num_tokens_need_slot = min(num_main_tokens + num_lookahead_tokens, self.max_model_len)
        num_blocks_to_allocate = self.coordinator.get_num_blocks_to_allocate(
            request.request_id, num_tokens_need_slot, hits.blocks
        )
        if num_blocks_to_allocate > self.block_pool.get_num_free_blocks():
            return None

        # The hits first, in all groups: a new block must not be one of them.
        if not hits.is_empty():
            self.coordinator.allocate_new_computed_blocks(request.request_id, hits.blocks)
        new_blocks = self.empty_kv_cache_blocks
        if num_blocks_to_allocate > 0:
            new_blocks = KVCacheBlocks(
                self.coordinator.allocate_new_blocks(request.request_id, num_tokens_need_slot)
            )
        if self.enable_caching:
            if new_computed_blocks is not None and not request.skip_reading_prefix_cache:
                self.prefix_cache_stats.record(
                    num_tokens=request.num_tokens,
                    num_hits=num_new_computed_tokens,
                    is_resumed=request.num_preemptions > 0,
                )
            if not delay_cache_blocks:
                # Before they are written: an equal prompt in the same step can share them, as
                # each layer writes all K and V of a step before it reads any.
                self.cache_blocks(request, min(num_main_tokens, request.num_tokens))
        return new_blocks

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Makes the blocks that the request's first `num_tokens` tokens fill findable."""
        self.coordinator.cache_blocks(request, num_tokens)

    def free(self, request: CacheRequest) -> None:
        """Takes the request's blocks back, if it has any; its prefix is the last to be reused.

        Blocks past `request.num_computed_tokens` were never written, so they leave the cache.
        """
        self.coordinator.free(request.request_id, request.num_computed_tokens)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks that the request holds."""
        return KVCacheBlocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Physical ids of all blocks that the request holds, a list per group."""
        return self.get_blocks(request_id).get_block_ids()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group, leading blocks that every request holds."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def count_slots(self, requests: Iterable[CacheRequest]) -> tuple[int, int]:
        """Slots in held blocks, each block once, and those of them that hold a computed token.

        In O(requests): a shared block is full, so unused slots lie in tails that one request
        holds alone.

        Args:
            requests: All requests that hold blocks.
        """
        num_held_blocks = self.block_pool.num_blocks - 1 - self.block_pool.get_num_free_blocks()
        num_unused = sum(
            len(blocks) * self.block_size - request.num_computed_tokens
            for request in requests
            for blocks in self.coordinator.get_blocks(request.request_id)
        )
        num_allocated = num_held_blocks * self.block_size
        return num_allocated, num_allocated - num_unused

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block; False, and nothing changed, while a block is in use."""
        return self.block_pool.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Checks the pool, and that reference counts are what the block tables say.

        Raises:
            InvariantError: They are not.
        """
        self.block_pool.check_invariants()
        num_holders = Counter(
            block.block_id
            for manager in self.coordinator.single_type_managers
            for blocks in manager.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        )
        for block in self.block_pool.blocks:
            if block.ref_cnt != num_holders[block.block_id]:
                raise InvariantError(
                    f"{block!r} stands in {num_holders[block.block_id]} block tables."
                )
