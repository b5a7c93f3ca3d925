"""KVCacheManager: the scheduler's door to KV memory: prefix hits, room for tokens, freeing."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.observation import PrefixCacheMiss
from paxkv.contracts.protocols import CacheRequest
from paxkv.contracts.scheduler_output import BlockCopy
from paxkv.errors import InvariantError
from paxkv.kv_cache.coordinators.coordinator import GroupBlocks
from paxkv.kv_cache.coordinators.coordinator_choice import get_kv_cache_coordinator
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.observers.prefix_cache_miss import PrefixCacheMissExplainer, PrefixGroup
from paxkv.kv_cache.stats import PrefixCacheStats


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of one request: `blocks[group][i]` is its i-th block in that KV cache group.

    Args:
        is_fork: They are another request's, and not hits of the prefix cache.
    """

    blocks: GroupBlocks
    is_fork: bool = False

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Physical block ids, a list per group."""
        return tuple([block.block_id for block in group] for group in self.blocks)

    def is_empty(self) -> bool:
        return not any(self.blocks)


class KVCacheManager:
    """Gives requests blocks of KV memory and takes them back.

    Args:
        use_eagle: The drafter needs the last block of a prefix hit computed once more.
        observers: Get every change of the pool's blocks.
        dcp_world_size: Ranks that share each sequence in decode; `pcp_world_size` in prefill.

    Source: vLLM `v1/core/kv_cache_manager.py`.
    """

    def __init__(
        self,
        *,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        observers: Iterable[BlockPoolObserver] = (),
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> None:
        self.max_model_len = max_model_len
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            observers=observers,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
        )
        self.enable_caching = self.coordinator.enable_caching
        self.block_pool = self.coordinator.block_pool
        self.hash_block_size = self.coordinator.hash_block_size
        self.prefix_cache_stats = PrefixCacheStats()
        self._miss_explainer = PrefixCacheMissExplainer(
            block_pool=self.block_pool,
            groups=[
                PrefixGroup(
                    manager.kv_cache_group_id, manager.block_size, manager.get_num_skipped_tokens
                )
                for manager in self.coordinator.single_type_managers
            ],
            hash_block_size=self.hash_block_size,
        )
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

    def get_forked_blocks(self, source: CacheRequest, num_tokens: int) -> KVCacheBlocks | None:
        """Blocks of `source` that hold what a fork needs to go on behind its first `num_tokens`.

        They go to `allocate_slots` as `new_computed_blocks`, before anything else does. A last
        block that is filled in part is copied there, as the fork writes into it.

        Returns:
            None where not all of it is there: the tokens are not computed, or left the window,
            or a state has moved on, or the source holds nothing.
        """
        if not 0 < num_tokens <= source.num_computed_tokens:
            return None
        blocks = self.coordinator.get_blocks_to_fork(
            source.request_id, num_tokens, source.num_computed_tokens
        )
        return None if blocks is None else KVCacheBlocks(blocks, is_fork=True)

    def allocate_slots(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> KVCacheBlocks | None:
        """Gives the request room for its next tokens.

            | computed | new computed | external | new | lookahead |
            |   held   |     hits     |        new blocks         |
            |           computed before          | now |
            |            cached, where full            |

        Blocks that no token from `new` on reads are given up first. A block that the request is
        to write into, and that others hold or can find, is replaced by a copy.

        Args:
            num_new_tokens: Tokens to compute in this step; 0 while external ones are being loaded.
            num_new_computed_tokens: Tokens in `new_computed_blocks`.
            new_computed_blocks: From `get_computed_blocks` or `get_forked_blocks`, at admission.
            num_lookahead_tokens: Slots beyond the new tokens, for tokens not yet known.
            num_external_computed_tokens: Tokens behind the computed ones that come from outside.
            delay_cache_blocks: Leaves caching to a later `cache_blocks`.
            num_encoder_tokens: What cross-attention needs room for, when the request is admitted.
            full_sequence_must_fit: There must be room for all tokens of the request that are
                known, computed `num_new_tokens` a step, though only these get it now.

        Returns:
            The new blocks, without those in `new_computed_blocks`. None means that there is no
            room, so preempt; then nothing has changed, but blocks given up stay so.
        """
        if num_new_tokens < 1 and num_external_computed_tokens < 1:
            raise InvariantError(f"{num_new_tokens=} must be at least 1.")
        request_id, coordinator = request.request_id, self.coordinator
        num_computed_tokens = request.num_computed_tokens + num_new_computed_tokens
        num_computed_tokens += num_external_computed_tokens
        num_main_tokens = num_computed_tokens + num_new_tokens
        num_slots = min(num_main_tokens + num_lookahead_tokens, self.max_model_len)
        # Also where the request then does not fit: another may have the blocks.
        coordinator.remove_skipped_blocks(request_id, num_computed_tokens)
        hits = self.empty_kv_cache_blocks if new_computed_blocks is None else new_computed_blocks
        num_blocks_to_allocate = coordinator.get_num_blocks_to_allocate(
            request_id,
            num_slots,
            hits.blocks,
            num_encoder_tokens,
            num_computed_tokens,
            num_main_tokens,
        )
        if num_blocks_to_allocate > self.block_pool.get_num_free_blocks():
            return None
        if full_sequence_must_fit and not self._full_sequence_fits(
            request, num_new_tokens, hits, num_computed_tokens, num_encoder_tokens
        ):
            return None

        if new_computed_blocks is not None or num_external_computed_tokens > 0:
            self._take_computed_blocks(
                request, hits, num_new_computed_tokens, num_external_computed_tokens
            )
        new_blocks = self.empty_kv_cache_blocks
        if num_blocks_to_allocate > 0:
            blocks = coordinator.allocate_new_blocks(
                request_id, num_slots, num_encoder_tokens, num_computed_tokens, num_main_tokens
            )
            new_blocks = KVCacheBlocks(blocks)
        if self.enable_caching and not delay_cache_blocks:
            # Before they are written: an equal prompt in the same step can share them, as each
            # layer writes all K and V of a step before it reads any.
            coordinator.cache_blocks(request, min(num_main_tokens, request.num_tokens))
        return new_blocks

    def get_num_blocks_to_reserve(self, request: CacheRequest, num_tokens: int) -> int:
        """Free blocks that `reserve_slots` would take."""
        return self.coordinator.get_num_blocks_to_allocate(
            request.request_id,
            num_tokens,
            self.empty_kv_cache_blocks.blocks,
            0,
            num_tokens,
            num_tokens,
        )

    def reserve_slots(self, request: CacheRequest, num_tokens: int) -> KVCacheBlocks:
        """Gives slots for its first `num_tokens` tokens to a request that has those of a step.

        What lies behind the step's tokens is its own and empty, and a token that is not known
        fills no block that could be found: so nothing is copied, cached or given up. There must
        be room.

        Returns:
            The new blocks.
        """
        if self.get_num_blocks_to_reserve(request, num_tokens) == 0:
            return self.empty_kv_cache_blocks
        return KVCacheBlocks(
            self.coordinator.allocate_new_blocks(
                request.request_id, num_tokens, 0, num_tokens, num_tokens
            )
        )

    def get_num_tokens_before_block_work(
        self, request: CacheRequest, *, are_cached_late: bool = False
    ) -> int:
        """Most tokens for which `allocate_slots` would do nothing for a running request.

        While its computed, new and lookahead tokens are no more than these, every token has a
        slot, no block becomes full, none leaves a window and nothing is copied, so that the call
        may be left out. It is so until the request is forked from, or loses its blocks.

        Args:
            are_cached_late: The caller makes full blocks findable by `cache_blocks`: a token that
                is computed before it is known fills none of which `allocate_slots` could tell.
        """
        return self.coordinator.get_num_tokens_before_block_work(
            request.request_id, are_cached_late=are_cached_late
        )

    def take_block_copies(self) -> list[BlockCopy]:
        """Copies decided since the last call, no two to one block; to be done all at once.

        To be called when a step has been decided: what comes then belongs to the next one.
        """
        self.coordinator.new_step_starts()
        return self.coordinator.device_block_work.take_copies()

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out to attention groups since the last call, but those copied over.

        Their old bytes are to be cleared, after the step's copies. Recorded only where there are
        Mamba groups, whose bytes attention must not read.
        """
        return self.coordinator.device_block_work.take_new_block_ids()

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Makes the blocks that the request's first `num_tokens` tokens fill findable."""
        self.coordinator.cache_blocks(request, num_tokens)

    def free(self, request: CacheRequest) -> None:
        """Takes the request's blocks back, if it has any; its prefix is the last to be reused.

        Blocks past `request.num_computed_tokens` were never written, so they leave the cache.
        """
        self.coordinator.free(request.request_id, request.num_computed_tokens)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks that the request holds, null blocks in place of those it gave up."""
        return KVCacheBlocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Physical ids of all blocks that the request holds, a list per group."""
        return self.get_blocks(request_id).get_block_ids()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group, leading blocks that every request holds."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of the prefix cache, as when what they hold is not valid."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block; False, and nothing changed, while a request holds one."""
        if not self.block_pool.reset_prefix_cache():
            return False
        self.prefix_cache_stats.on_reset()
        return True

    def explain_miss(self, request: CacheRequest) -> PrefixCacheMiss:
        """Why the request found no more in the prefix cache when it was admitted.

        Of one that was not admitted lately: why it would not now.
        """
        answer = self.explain_admission(request.request_id)
        if answer is None:
            _, num_hit_tokens = self.get_computed_blocks(request)
            answer = self._miss_explainer.explain(request, num_hit_tokens)
        return answer

    def explain_admission(self, request_id: str) -> PrefixCacheMiss | None:
        """The same by id, also of a request that has ended; None if not admitted lately."""
        return self._miss_explainer.answer(request_id)

    def count_slots(self, requests: Iterable[CacheRequest]) -> tuple[int, int]:
        """Slots in held blocks, each block once, and those of them that hold a computed token.

        In O(requests): whoever writes into a block holds it alone, so unused slots lie in tails
        of one request. Slots of sinks are not counted.

        Args:
            requests: All requests that hold blocks.
        """
        managers = self.coordinator.single_type_managers
        num_allocated = sum(manager.num_held_blocks * manager.block_size for manager in managers)
        num_unused = sum(
            manager.get_num_unused_slots(request.request_id, request.num_computed_tokens)
            for request in requests
            for manager in managers
        )
        return num_allocated, num_allocated - num_unused

    def check_invariants(self) -> None:
        """Checks the pool, the block tables, and that reference counts are what they say.

        Raises:
            InvariantError: They are not.
        """
        self.block_pool.check_invariants()
        num_holders: Counter[int] = Counter()
        for manager in self.coordinator.single_type_managers:
            manager.check_invariants()
            num_holders.update(block.block_id for block in manager.get_permanent_blocks())
            for blocks in manager.req_to_blocks.values():
                num_holders.update(block.block_id for block in blocks if not block.is_null)
        for block in self.block_pool.blocks:
            if block.ref_cnt != num_holders[block.block_id]:
                raise InvariantError(
                    f"{block!r} stands in {num_holders[block.block_id]} block tables."
                )

    def _full_sequence_fits(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        computed_blocks: KVCacheBlocks,
        num_computed_tokens: int,
        num_encoder_tokens: int,
    ) -> bool:
        """Whether all known tokens could be computed, `num_new_tokens` a step, in what is free."""
        num_tokens = max(num_computed_tokens + num_new_tokens, request.num_tokens)
        num_blocks = self.coordinator.get_num_blocks_for_full_sequence(
            request.request_id,
            min(num_tokens, self.max_model_len),
            computed_blocks.blocks,
            num_encoder_tokens,
            num_computed_tokens,
            max(num_new_tokens, 1),
        )
        return num_blocks <= self.block_pool.get_num_free_blocks()

    def _take_computed_blocks(
        self,
        request: CacheRequest,
        computed_blocks: KVCacheBlocks,
        num_new_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Starts the block tables of a request that is admitted, and notes what it found."""
        is_new = not any(self.coordinator.get_blocks(request.request_id))
        # A fork did not look into the prefix cache; nor did one that waited to be loaded, again.
        if is_new and not computed_blocks.is_fork:
            self._miss_explainer.record(request, num_new_computed_tokens)
            if self.enable_caching and not request.skip_reading_prefix_cache:
                self.prefix_cache_stats.record(
                    num_tokens=request.num_tokens,
                    num_hits=num_new_computed_tokens,
                    is_resumed=request.num_preemptions > 0,
                )
        # In all groups before any gets a new block: that must not be one of them.
        if num_external_computed_tokens > 0 or not computed_blocks.is_empty():
            self.coordinator.allocate_new_computed_blocks(
                request.request_id,
                computed_blocks.blocks,
                request.num_computed_tokens + num_new_computed_tokens,
                num_external_computed_tokens,
            )
