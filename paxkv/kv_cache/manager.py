"""KVCacheManager: the scheduler's interface to KV memory."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable

from paxkv.contracts.kv_cache_spec import KVCacheConfig, cdiv
from paxkv.contracts.observation import PrefixCacheMiss
from paxkv.contracts.protocols import CacheRequest
from paxkv.contracts.scheduler_output import BlockCopy
from paxkv.errors import ConfigError, InvariantError
from paxkv.kv_cache.coordinators.coordinator import GroupBlocks
from paxkv.kv_cache.coordinators.coordinator_choice import get_kv_cache_coordinator
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.observers.prefix_cache_miss import PrefixCacheMissExplainer, PrefixGroup
from paxkv.kv_cache.pool.block import Slot
from paxkv.kv_cache.save_points import SavePoints
from paxkv.kv_cache.stats import PrefixCacheStats


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of one request: `blocks[group][i]` is its i-th block in that KV cache group.

    Args:
        is_fork: The blocks belong to the fork source; they are not prefix hits.
    """

    blocks: GroupBlocks
    is_fork: bool = False

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Physical block ids, a list per group. The caller must not change the lists."""
        return tuple(
            [
                group.block_ids if isinstance(group, Slot) else [block.block_id for block in group]
                for group in self.blocks
            ]
        )

    def is_empty(self) -> bool:
        return not any(self.blocks)


class KVCacheManager:
    """Finds cached prefixes, allocates blocks of KV memory for requests, and frees them.

    Args:
        use_eagle: Compute the last block of a prefix hit again, because the drafter needs it.
        state_cache_share: Share of the blocks that saved states may take, in [0, 1]. It is divided
            evenly among the groups of states.
        state_save_interval: Tokens between two further save points in prompts; they are rounded up
            to whole blocks. None: no further save points.
        observers: Receive every change of the pool's blocks.

    Source: vLLM `v1/core/kv_cache_manager.py`.
    """

    def __init__(
        self,
        *,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        state_cache_share: float = 1.0,
        state_save_interval: int | None = None,
        observers: Iterable[BlockPoolObserver] = (),
    ) -> None:
        self.max_model_len = max_model_len
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            observers=observers,
        )
        self.enable_caching = self.coordinator.enable_caching
        self.block_pool = self.coordinator.block_pool
        self.hash_block_size = self.coordinator.hash_block_size
        self.prefix_cache_stats = PrefixCacheStats()
        state_managers = self.coordinator.state_managers
        for manager in state_managers:
            max_blocks = int(self.block_pool.num_blocks * state_cache_share) // len(state_managers)
            manager.saved_states.max_blocks = max_blocks
        can_save = all(manager.can_save_states for manager in state_managers)
        self._miss_explainer = PrefixCacheMissExplainer(
            block_pool=self.block_pool,
            groups=[
                PrefixGroup(
                    manager.kv_cache_group_id,
                    manager.block_size,
                    manager.get_num_skipped_tokens,
                    manager.kv_cache_spec.kind,
                    manager.holds_tokens,
                )
                for manager in sorted(
                    self.coordinator.single_type_managers, key=lambda m: not m.holds_tokens
                )
            ],
            hash_block_size=self.hash_block_size,
        )
        self._save_points = SavePoints(block_size=None)
        if self.enable_caching and state_managers and can_save:
            block_sizes = [m.block_size for m in self.coordinator.single_type_managers]
            block_size = math.lcm(*block_sizes)
            sizes = {manager.block_size for manager in state_managers}
            if sizes != {block_size}:
                raise ConfigError(
                    "the block size of states must be the least common multiple of all block "
                    f"sizes, got {block_sizes}."
                )
            interval = state_save_interval
            if interval is not None:
                interval = cdiv(interval, block_size) * block_size
            self._save_points = SavePoints(block_size=block_size, interval=interval)
        for manager in state_managers:
            manager.save_points = self._save_points
        # Most calls return no new block, so all of them return this object.
        self.empty_kv_cache_blocks = KVCacheBlocks(
            tuple(() for _ in range(self.num_kv_cache_groups))
        )

    @property
    def saves_states(self) -> bool:
        """Whether states of recurrent layers enter the prefix cache."""
        return self._save_points.block_size is not None

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, in [0, 1]."""
        return self.block_pool.get_usage()

    def get_computed_blocks(self, request: CacheRequest) -> tuple[KVCacheBlocks, int]:
        """Finds the longest cached prefix of the request: its blocks and its number of tokens.

        The blocks are not allocated here. The caller must pass them to `allocate_slots` before any
        other change of the pool.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        # The last token must be computed, because its logits give the next one. A hit consists of
        # whole blocks, so a whole block may be computed again.
        blocks, num_computed_tokens = self.coordinator.find_longest_cache_hit(
            request.block_hashes, max_cache_hit_length=request.num_tokens - 1
        )
        if num_computed_tokens == 0:
            return self.empty_kv_cache_blocks, 0
        return KVCacheBlocks(blocks), num_computed_tokens

    def get_state_to_save(self, request: CacheRequest, num_hit_tokens: int) -> int:
        """Tokens after which a request should save its state, because others share this prefix.

        Their keys and values were found, and a state was not. 0 if there is no such prefix.

        Args:
            num_hit_tokens: Length of the hit that `get_computed_blocks` found for the request.
        """
        if not self.saves_states or request.skip_reading_prefix_cache:
            return 0
        return self.coordinator.find_state_to_save(
            request.block_hashes, request.num_tokens - 1, num_hit_tokens
        )

    def cut_at_save_point(
        self,
        request: CacheRequest,
        num_computed_tokens: int,
        num_new_tokens: int,
        *,
        has_drafts: bool = False,
    ) -> int:
        """Number of new tokens that the next step may compute, so that it ends at a save point.

        Only a state at the end of a step can be saved; see `save_points.py`.
        """
        if not self.coordinator.state_managers:
            return num_new_tokens
        return self._save_points.cut(
            request, num_computed_tokens, num_new_tokens, has_drafts=has_drafts
        )

    def get_forked_blocks(
        self, source: CacheRequest, num_tokens: int, *, is_final: bool = False
    ) -> KVCacheBlocks | None:
        """Blocks of `source` that a fork needs in order to continue after `num_tokens` tokens.

        The caller must pass them to `allocate_slots` as `new_computed_blocks`, before any other
        change of the pool. `allocate_slots` copies a partly filled last block, because the fork
        writes into it.

        Args:
            is_final: The source has ended, and its state is that after its computed tokens.

        Returns:
            None if the source lacks a needed block: a token is not computed or has left the
            window, the state after these tokens was not kept, or the source holds no blocks.
        """
        if not 0 < num_tokens <= source.num_computed_tokens:
            return None
        blocks = self.coordinator.get_blocks_to_fork(
            source.request_id, num_tokens, source.num_computed_tokens, is_final=is_final
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
        """Allocates slots for the request's next tokens.

            | computed | new computed | external | new | lookahead |
            |   held   |     hits     |        new blocks         |
            |           computed before          | now |
            |            cached, where full            |

        First, blocks that the `new` and later tokens do not read are freed. If the request will
        write into a block that another request holds or could find by its hash, a copy replaces
        this block.

        Args:
            num_new_tokens: Tokens to compute in this step; 0 while external tokens are loaded.
            num_new_computed_tokens: Tokens in `new_computed_blocks`.
            new_computed_blocks: From `get_computed_blocks` or `get_forked_blocks`, at admission.
            num_lookahead_tokens: Slots after the new tokens, for tokens not yet known.
            num_external_computed_tokens: Tokens after the computed ones that a connector loads.
            delay_cache_blocks: The caller calls `cache_blocks` later.
            num_encoder_tokens: Encoder tokens for cross-attention, given at admission.
            full_sequence_must_fit: Return None unless the free blocks suffice for all known tokens
                of the request, computed `num_new_tokens` per step.

        Returns:
            The new blocks, without `new_computed_blocks`. None means that there is no room, so the
            caller should preempt a request. Then nothing was allocated, but the blocks that are no
            longer read were freed.
        """
        if num_new_tokens < 1 and num_external_computed_tokens < 1:
            raise InvariantError(f"{num_new_tokens=} must be at least 1.")
        request_id, coordinator = request.request_id, self.coordinator
        num_computed_tokens = request.num_computed_tokens + num_new_computed_tokens
        num_computed_tokens += num_external_computed_tokens
        num_main_tokens = num_computed_tokens + num_new_tokens
        num_slots = min(num_main_tokens + num_lookahead_tokens, self.max_model_len)
        # Even if the request does not fit afterwards, another request can use these blocks.
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
        num_spare_blocks = self.block_pool.get_num_free_blocks() - num_blocks_to_allocate
        if num_spare_blocks < 0:
            return None
        if full_sequence_must_fit and not self._full_sequence_fits(
            request, num_new_tokens, hits, num_computed_tokens, num_encoder_tokens
        ):
            return None

        takes_slot = bool(coordinator.state_managers) and coordinator.plan_slots(
            request, hits.blocks, num_computed_tokens, num_spare_blocks
        )
        if new_computed_blocks is not None or num_external_computed_tokens > 0:
            self._start_block_tables(
                request, hits, num_new_computed_tokens, num_external_computed_tokens
            )
        new_blocks = self.empty_kv_cache_blocks
        # A new slot of states may be one that the request holds already.
        if num_blocks_to_allocate > 0 or takes_slot:
            blocks = coordinator.allocate_new_blocks(
                request_id, num_slots, num_encoder_tokens, num_computed_tokens, num_main_tokens
            )
            new_blocks = KVCacheBlocks(blocks)
        if self.enable_caching and not delay_cache_blocks:
            # Blocks are cached before they are written, so an equal prompt in the same step can
            # share them: each layer writes all K and V of a step before it reads any.
            coordinator.cache_blocks(request, min(num_main_tokens, request.num_tokens))
        return new_blocks

    def get_num_blocks_to_reserve(self, request: CacheRequest, num_tokens: int) -> int:
        """Number of free blocks that `reserve_slots` would allocate."""
        return self.coordinator.get_num_blocks_to_allocate(
            request.request_id,
            num_tokens,
            self.empty_kv_cache_blocks.blocks,
            0,
            num_tokens,
            num_tokens,
        )

    def reserve_slots(self, request: CacheRequest, num_tokens: int) -> KVCacheBlocks:
        """Allocates slots for a burst: up to `num_tokens` tokens of the request in total.

        The request must have the slots of one step already, and enough blocks must be free.
        Nothing is copied, cached or freed: the slots after the step's tokens belong to the request
        alone, and a block can be cached only when its tokens are known.

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

    def switch_slot(
        self, request: CacheRequest, num_tokens: int
    ) -> tuple[int, KVCacheBlocks] | None:
        """Gives a request new slots of states in the middle of a burst; see `MambaManager`.

        Args:
            num_tokens: The request's tokens after the burst.

        Returns:
            Position of the first token whose state is written to the new slots, and the slots. None
            if no state is to be saved, or there is no room.
        """
        managers = self.coordinator.state_managers
        num_blocks = sum(manager.num_blocks_to_switch(request.request_id) for manager in managers)
        if not self.saves_states or num_blocks > self.block_pool.get_num_free_blocks():
            return None
        # All groups change their slots at one position.
        if any(manager.has_switched(request.request_id) for manager in managers):
            return None
        position = 0
        blocks = list(self.empty_kv_cache_blocks.blocks)
        for manager in managers:
            position, blocks[manager.kv_cache_group_id] = manager.switch_slot(request, num_tokens)
        return (position, KVCacheBlocks(tuple(blocks))) if any(blocks) else None

    def finish_step(self) -> None:
        """Releases blocks that only the step which has been decided needs.

        Call it when a step is decided; later changes belong to the next step.
        """
        self.coordinator.finish_step()

    def free_spare_slot(self) -> bool:
        """Frees a slot that a request holds in addition to its own; False if there is none."""
        freed = [manager.free_spare_slot() for manager in self.coordinator.state_managers]
        return any(freed)

    def get_max_tokens_before_allocate(
        self,
        request: CacheRequest,
        *,
        are_cached_late: bool = False,
        is_step_decided: bool = False,
    ) -> int:
        """Largest number of tokens for which `allocate_slots` has nothing to do.

        While a running request's computed, new and lookahead tokens together do not exceed this
        number, the scheduler may skip the call: every token has a slot, no block becomes full, no
        block leaves a window, and no block is copied. The number is valid until the request is
        forked or loses its blocks.

        Args:
            are_cached_late: Ignore that blocks become full. The caller calls `cache_blocks` itself,
                because it knows their tokens only after they are computed.
            is_step_decided: `allocate_slots` was called for the step that starts after the
                request's computed tokens.
        """
        num_tokens = self.coordinator.get_max_tokens_before_allocate(
            request.request_id, are_cached_late=are_cached_late
        )
        if not self.coordinator.state_managers:
            return num_tokens
        max_tokens = self._save_points.max_tokens_before(request, is_step_decided=is_step_decided)
        return min(num_tokens, max_tokens)

    def drain_block_copies(self) -> list[BlockCopy]:
        """Block copies since the last call, which the runner makes all at once.

        No two copies have the same target. Call it when a step is decided; later changes belong to
        the next step.
        """
        return self.coordinator.device_block_work.drain_copies()

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Adds the blocks that the request's first `num_tokens` tokens fill to the prefix cache."""
        self.coordinator.cache_blocks(request, num_tokens)

    def free(self, request: CacheRequest) -> None:
        """Frees the request's blocks, if it has any. The blocks of its prefix are evicted last.

        Blocks past `request.num_computed_tokens` were never written, so they leave the prefix
        cache.
        """
        self.coordinator.free(request.request_id, request.num_computed_tokens)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's block tables, with null blocks in place of freed ones."""
        return KVCacheBlocks(self.coordinator.get_blocks(request_id))

    def get_first_step_blocks(self, request_id: str) -> KVCacheBlocks:
        """The block tables of a request that starts or resumes, in the form of `NewRequestData`."""
        return KVCacheBlocks(self.coordinator.get_first_step_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Physical ids of the blocks in the request's block tables, a list per group."""
        return self.get_blocks(request_id).get_block_ids()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group, the number of leading blocks that every request holds."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Removes blocks from the prefix cache, for example if their content is invalid."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Returns False, and changes nothing, if requests hold blocks."""
        if not self.block_pool.reset_prefix_cache():
            return False
        self.prefix_cache_stats.on_reset()
        return True

    def explain_miss(self, request: CacheRequest) -> PrefixCacheMiss:
        """Explains why the request found no more in the prefix cache when it was admitted.

        If the request was not admitted recently, explains what a look-up finds now.
        """
        answer = self.explain_admission(request.request_id)
        if answer is None:
            _, num_hit_tokens = self.get_computed_blocks(request)
            answer = self._miss_explainer.explain(request, num_hit_tokens)
        return answer

    def explain_admission(self, request_id: str) -> PrefixCacheMiss | None:
        """Explains a recent admission, even if the request has ended; None if it is not recent."""
        return self._miss_explainer.answer(request_id)

    def count_slots(self, requests: Iterable[CacheRequest]) -> tuple[int, int]:
        """Number of slots in held blocks, and number of slots that hold a computed token.

        A shared block counts once; slots of sinks and blocks of states do not count. The cost is
        O(requests): a request writes only into blocks that no other request holds, so unused slots
        are at the end of one request's table.

        Args:
            requests: All requests that hold blocks.
        """
        managers = [m for m in self.coordinator.single_type_managers if m.holds_tokens]
        num_allocated = sum(manager.num_held_blocks * manager.block_size for manager in managers)
        num_unused = sum(
            manager.get_num_unused_slots(request.request_id, request.num_computed_tokens)
            for request in requests
            for manager in managers
        )
        return num_allocated, num_allocated - num_unused

    def check_invariants(self) -> None:
        """Checks the pool, the block tables, and that reference counts match the tables.

        Raises:
            InvariantError: A rule is broken.
        """
        self.block_pool.check_invariants()
        num_holders: Counter[int] = Counter()
        for manager in self.coordinator.single_type_managers:
            manager.check_invariants()
            num_holders.update(block.block_id for block in manager.get_permanent_blocks())
            num_holders.update(block.block_id for block in manager.get_extra_blocks())
            for blocks in manager.req_to_blocks.values():
                num_holders.update(block.block_id for block in blocks if not block.is_null)
        for block in self.block_pool.blocks:
            if block.ref_cnt != num_holders[block.block_id]:
                raise InvariantError(f"{block!r} is in {num_holders[block.block_id]} block tables.")

    def _full_sequence_fits(
        self,
        request: CacheRequest,
        num_new_tokens: int,
        computed_blocks: KVCacheBlocks,
        num_computed_tokens: int,
        num_encoder_tokens: int,
    ) -> bool:
        """Whether the free blocks suffice for all known tokens, at `num_new_tokens` per step."""
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

    def _start_block_tables(
        self,
        request: CacheRequest,
        computed_blocks: KVCacheBlocks,
        num_new_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Starts the block tables of an admitted request, and records its prefix hit."""
        is_new = not any(self.coordinator.get_blocks(request.request_id))
        # Forks, and requests that waited for a load (`is_new` is False), made no look-up now.
        if is_new and not computed_blocks.is_fork:
            self._miss_explainer.record(request, num_new_computed_tokens)
            if self.enable_caching and not request.skip_reading_prefix_cache:
                self.prefix_cache_stats.record(
                    num_tokens=request.num_tokens,
                    num_hits=num_new_computed_tokens,
                    is_resumed=request.num_preemptions > 0,
                )
        # All groups get their hits before any group gets a new block. Otherwise a new block might
        # be another group's hit.
        if num_external_computed_tokens > 0 or not computed_blocks.is_empty():
            self.coordinator.allocate_new_computed_blocks(
                request.request_id,
                computed_blocks.blocks,
                request.num_computed_tokens + num_new_computed_tokens,
                num_external_computed_tokens,
            )
