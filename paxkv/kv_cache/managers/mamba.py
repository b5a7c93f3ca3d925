"""MambaManager: the slots in which requests keep the states of recurrent layers."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import ClassVar

from paxkv.contracts.kv_cache_spec import KVCacheSpec, MambaSpec
from paxkv.contracts.protocols import CacheRequest
from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.block_hash import BlockHash, get_group_id
from paxkv.kv_cache.managers.device_block_work import DeviceBlockWork
from paxkv.kv_cache.managers.saved_states import SavedState, SavedStates
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.pool.block import KVCacheBlock, Slot
from paxkv.kv_cache.pool.block_pool import BlockPool
from paxkv.kv_cache.save_points import SavePoints, is_fork_point


@dataclasses.dataclass(slots=True, kw_only=True)
class _Plan:
    """What `plan_slot` has decided for a request.

    Args:
        num_computed_tokens: Tokens of the state that the step reads.
        takes_new_slot: The request writes a new slot, and the slot that it reads stays as it is.
        replaces: The new slot is that of an older state of the request. Otherwise it is free.
    """

    request: CacheRequest
    num_computed_tokens: int
    takes_new_slot: bool
    replaces: bool = False


class MambaManager(SingleTypeKVCacheManager):
    """One slot per request, which is overwritten by every step.

    The slot has the state after the request's last computed token. To save a state, the next step
    reads it from there but writes another slot. The old slot then belongs to no request. Other
    requests find it by its hash, and it becomes free memory as other blocks do. A request with a
    hit reads the saved slot and writes one of its own. So nothing is copied. While a request
    decodes, it holds its last states itself, and writes their slots in turn.

    Saving never takes memory from a request: if the pool has no room for another slot, the state is
    overwritten.
    """

    holds_tokens: ClassVar[bool] = False
    kv_cache_spec: MambaSpec

    def __init__(
        self,
        *,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        kv_cache_group_id: int,
        device_block_work: DeviceBlockWork | None = None,
    ) -> None:
        super().__init__(
            kv_cache_spec=kv_cache_spec,
            block_pool=block_pool,
            kv_cache_group_id=kv_cache_group_id,
            device_block_work=device_block_work,
        )
        self.saved_states = SavedStates(
            block_pool,
            kv_cache_group_id=kv_cache_group_id,
            block_size=self.block_size,
            num_slot_blocks=kv_cache_spec.num_slot_blocks,
        )
        # `KVCacheManager` sets them, if states of all groups can be saved.
        self.save_points = SavePoints(block_size=None)
        # Slots by the id of their first block, also of requests that have ended.
        self._slots: dict[int, list[KVCacheBlock]] = {}
        # The next four describe slots that requests hold in addition to those in `req_to_blocks`.
        # Request id -> slot that the request reads in the step that is being decided.
        self._read_slots: dict[str, list[KVCacheBlock]] = {}
        # Request id -> state in its read slot, if the request still holds the slot after the step.
        self._rolling_reads: dict[str, SavedState] = {}
        # Request id -> states after tokens that the host does not know yet.
        self._unknown: dict[str, list[SavedState]] = {}
        # Request id -> state from which other requests can fork.
        self._fork_states: dict[str, SavedState] = {}
        self._plan: _Plan | None = None
        # Running requests that get a new slot in the step that is being decided.
        self._switched: set[str] = set()

    @property
    def can_save_states(self) -> bool:
        """Whether states can enter the prefix cache."""
        has_room = self.saved_states.max_blocks >= self.kv_cache_spec.num_slot_blocks
        return self.enable_caching and has_room

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        # A hit needs only the state at its end.
        return max(num_computed_tokens - 1, 0) // self.block_size * self.block_size

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        # A hit that no request holds needs as many blocks as a miss: without room for a second
        # slot, the request continues in the saved one.
        return 0 if request_id in self.req_to_blocks else self.kv_cache_spec.num_slot_blocks

    def plan_slot(
        self,
        request: CacheRequest,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_computed_tokens: int,
        num_spare_blocks: int,
    ) -> int | None:
        """Decides whether the request writes a new slot; the calls that allocate blocks follow it.

        Args:
            num_spare_blocks: Free blocks that the request does not need otherwise.

        Returns:
            Number of the spare blocks that are taken. None if the request does not need a slot, or
            takes the one that it needs in any case.
        """
        num_slot_blocks = self.kv_cache_spec.num_slot_blocks
        replaces = False
        if request.request_id not in self.req_to_blocks:
            is_wanted = bool(new_computed_blocks) and new_computed_blocks[-1].ref_cnt == 0
            takes_new_slot = is_wanted and num_spare_blocks >= num_slot_blocks
        else:
            # Most steps of running requests end here.
            if num_computed_tokens % self.block_size and not request.keeps_state_for_forks:
                return None
            if not self._should_save(request, num_computed_tokens):
                return None
            replaces = self.saved_states.can_replace(request.request_id)
            if replaces:
                num_slot_blocks = 0
            takes_new_slot = num_spare_blocks >= num_slot_blocks
            if not takes_new_slot:
                return None
        self._plan = _Plan(
            request=request,
            num_computed_tokens=num_computed_tokens,
            takes_new_slot=takes_new_slot,
            replaces=replaces,
        )
        return num_slot_blocks if takes_new_slot else None

    def has_switched(self, request_id: str) -> bool:
        """Whether the request has a new slot in the step that is being decided."""
        return request_id in self._switched

    def num_blocks_to_switch(self, request_id: str) -> int:
        """Number of free blocks that `switch_slot` allocates."""
        can_replace = self.saved_states.can_replace(request_id)
        return 0 if can_replace else self.kv_cache_spec.num_slot_blocks

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """See the base class. The last of the blocks is the first one of a slot.

        Raises:
            InvariantError: The state after the computed tokens is missing.
        """
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        if num_external_computed_tokens > 0 or (num_tokens > 0 and not new_computed_blocks):
            raise InvariantError(f"{request_id=} has no state of its first {num_tokens} tokens.")
        if not new_computed_blocks:
            return
        first = new_computed_blocks[-1]
        slot = self._slots[first.block_id]
        if first.block_hash is not None:
            self.saved_states.touch(self.saved_states.find(first))
        if first.ref_cnt > 0 or self._plan.takes_new_slot:
            self._touch(slot)
            self._read_slots[request_id] = slot
            return
        if first.block_hash is not None:
            self.saved_states.remove(self.saved_states.find(first))
        self.block_pool.allocate_blocks(slot)
        self.num_held_blocks += len(slot)
        self.req_to_blocks[request_id] = slot

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Sequence[KVCacheBlock]:
        plan, self._plan = self._plan, None
        old = self.req_to_blocks.get(request_id)
        if old is None:
            self.req_to_blocks[request_id] = new = self._get_free_slot()
            source = self._read_slots.get(request_id)
            if source is not None and plan is not None:
                self._keep_for_forks(plan.request, source, plan.num_computed_tokens)
            return new
        if plan is None or not plan.takes_new_slot:
            return ()
        self.req_to_blocks[request_id] = new = self._get_new_slot(request_id, plan.replaces)
        self._leave_slot(plan.request, old, plan.num_computed_tokens)
        return new

    def switch_slot(self, request: CacheRequest, num_tokens: int) -> tuple[int, list[KVCacheBlock]]:
        """Gives a request a new slot in the middle of a burst, to save the state before it.

        Args:
            num_tokens: The request's tokens after the burst.

        Returns:
            Position of the first token whose state is written to the new slot, and the slot. The
            slot is empty if the burst passes no position at which a state is saved.
        """
        request_id = request.request_id
        position = (num_tokens - 1) // self.block_size * self.block_size
        if position <= request.num_computed_tokens:
            return 0, []
        old = self.req_to_blocks[request_id]
        can_replace = self.saved_states.can_replace(request_id)
        self.req_to_blocks[request_id] = new = self._get_new_slot(request_id, can_replace)
        state = SavedState(request, old, position)
        self._unknown.setdefault(request_id, []).append(state)
        return position, new

    def replace_shared_blocks(
        self, request_id: str, num_computed_tokens: int, num_tokens: int
    ) -> None:
        pass

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Keeps saved states whose `num_tokens` tokens are known now, as `_leave_slot` does."""
        unknown = self._unknown.get(request.request_id)
        while unknown and unknown[0].num_tokens <= num_tokens:
            self.saved_states.hold(unknown.pop(0))
        if unknown is not None and not unknown:
            del self._unknown[request.request_id]

    def finish_step(self) -> None:
        """Releases the slots that the step reads: later steps may write them."""
        for request_id, slot in self._read_slots.items():
            state = self._rolling_reads.get(request_id)
            if state is None:
                self._free_blocks(slot)
            else:
                self.saved_states.hold(state)
        self._read_slots.clear()
        self._rolling_reads.clear()
        self._switched.clear()

    def free(self, request_id: str, num_computed_tokens: int) -> None:
        """See the base class. The newest state of known tokens enters the prefix cache."""
        states = [*self.saved_states.held_states(request_id)]
        if request_id in self._rolling_reads:
            states.append(self._rolling_reads[request_id])
        if states:
            self.saved_states.add(states[-1])
        for slot in self._slots_of(request_id):
            self._free_blocks(slot)
        for held in (self.req_to_blocks, self._unknown, self._fork_states, self._read_slots):
            held.pop(request_id, None)
        self._rolling_reads.pop(request_id, None)
        self._switched.discard(request_id)
        self.saved_states.pop_held(request_id)

    def free_spare_slot(self) -> bool:
        """Frees a slot that a request holds in addition to its own; False if there is none.

        Afterwards, other requests can still find a saved state, but cannot fork from a state that
        was kept only for forks.
        """
        held = self.saved_states.pop_any_held()
        if held is not None:
            self._free_blocks(held.blocks)
            return True
        if not self._fork_states:
            return False
        state = self._fork_states.pop(next(iter(self._fork_states)))
        self._free_blocks(state.blocks)
        return True

    def get_first_step_blocks(self, request_id: str) -> Sequence[KVCacheBlock]:
        slot = self.req_to_blocks[request_id]
        return [*self._read_slots[request_id], *slot] if request_id in self._read_slots else slot

    def get_extra_blocks(self) -> Iterator[KVCacheBlock]:
        for slot in self._read_slots.values():
            yield from slot
        for state in self._fork_states.values():
            yield from state.blocks
        for slot in self.saved_states.all_held_slots():
            yield from slot
        for states in self._unknown.values():
            for state in states:
                yield from state.blocks

    def get_blocks_to_fork(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, *, is_final: bool
    ) -> list[KVCacheBlock] | None:
        """See the base class. The result is the first block of a slot."""
        if is_final and num_tokens == num_computed_tokens:
            return self.req_to_blocks[request_id][:1]
        state = self._fork_states.get(request_id)
        return None if state is None or state.num_tokens != num_tokens else state.blocks[:1]

    def get_max_tokens_before_allocate(
        self, request_id: str, *, are_cached_late: bool = False
    ) -> int:
        # A request that has its slot needs no further blocks. See also `save_points.py`.
        return sys.maxsize

    def get_num_unused_slots(self, request_id: str, num_computed_tokens: int) -> int:
        return 0

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
        """See the base class. Finds the last saved state; only its first block is in the result."""
        block_size = kv_cache_spec.block_size
        step = alignment_tokens // block_size
        end = min(max_length // block_size, len(block_hashes)) // step * step
        for num_blocks in range(end, 0, -step):
            first = block_pool.get_cached_block(block_hashes[num_blocks - 1], kv_cache_group_ids)
            if first is not None:
                nulls = [block_pool.null_block] * (num_blocks - 1)
                return tuple([*nulls, block] for block in first)
        return tuple([] for _ in kv_cache_group_ids)

    def check_invariants(self) -> None:
        """See the base class. Slots are complete, have no block in common, and keep their hash."""
        size = self.kv_cache_spec.num_slot_blocks
        holders = {*self._read_slots, *self._rolling_reads, *self._unknown, *self._fork_states}
        holders |= self._switched | self.saved_states.holder_ids()
        if not holders <= self.req_to_blocks.keys():
            raise InvariantError(f"{holders=} names requests that hold no slot of their own.")
        slots = {}
        for request_id in self.req_to_blocks:
            for slot in self._slots_of(request_id):
                slots[slot[0].block_id] = slot
        states = self.saved_states.find_all()
        slots |= {state.blocks[0].block_id: state.blocks for state in states}
        ids = [block.block_id for slot in slots.values() for block in slot]
        if len(ids) != len(slots) * size or len(set(ids)) != len(ids):
            raise InvariantError(f"slots of {size} blocks are not whole, or share blocks: {ids}.")
        for slot in slots.values():
            if any(b.ref_cnt != slot[0].ref_cnt or b.block_hash is not None for b in slot[1:]):
                raise InvariantError(f"the blocks of a slot have different holders: {slot}.")
        for request_id, slot in self.req_to_blocks.items():
            if slot[0].block_hash is not None:
                raise InvariantError(f"{request_id=} writes a saved state: {slot}.")
        held = sum(slot[0].ref_cnt > 0 for slot in slots.values()) * size
        if held != self.num_held_blocks:
            raise InvariantError(f"{held} blocks held, counted {self.num_held_blocks=}.")
        hashed = {state.blocks[0].block_id for state in states}
        cached = {
            block.block_id
            for key, block in self.block_pool.cached_block_hash_to_block.items()
            if get_group_id(key) == self.kv_cache_group_id
        }
        if hashed != cached:
            raise InvariantError(f"saved states start at {hashed}, hashed are {cached}.")

    def _should_save(self, request: CacheRequest, num_tokens: int) -> bool:
        if request.keeps_state_for_forks and is_fork_point(request, num_tokens):
            return True
        if not self.save_points.contains(request, num_tokens):
            return False
        # A decoding request writes its slots in turn, so another state costs nothing.
        is_rolling = num_tokens >= request.num_prompt_tokens
        return is_rolling or not self.saved_states.contains(request, num_tokens)

    def _leave_slot(self, request: CacheRequest, slot: list[KVCacheBlock], num_tokens: int) -> None:
        """Saves the state in the slot that the request has written so far."""
        request_id = request.request_id
        self._switched.add(request_id)
        self._keep_for_forks(request, slot, num_tokens)
        state = SavedState(request, slot, num_tokens)
        if num_tokens > request.num_tokens:
            self._unknown.setdefault(request_id, []).append(state)
            return
        self._read_slots[request_id] = slot
        if self.enable_caching and num_tokens % self.block_size == 0:
            if num_tokens >= request.num_prompt_tokens:
                self._rolling_reads[request_id] = state
            else:
                self.saved_states.add(state)

    def _keep_for_forks(
        self, request: CacheRequest, slot: list[KVCacheBlock], num_tokens: int
    ) -> None:
        if request.keeps_state_for_forks and is_fork_point(request, num_tokens):
            self._touch(slot)
            state = SavedState(request, slot, num_tokens)
            self._fork_states[request.request_id] = state

    def _get_new_slot(self, request_id: str, replaces: bool) -> list[KVCacheBlock]:
        return self.saved_states.pop_replaceable(request_id) if replaces else self._get_free_slot()

    def _get_free_slot(self) -> Slot:
        slot = Slot(self.block_pool.get_new_blocks(self.kv_cache_spec.num_slot_blocks))
        self.num_held_blocks += len(slot)
        self._slots[slot[0].block_id] = slot
        self._forget_old_slots()
        return slot

    def _forget_old_slots(self) -> None:
        max_slots = self.block_pool.num_blocks // self.kv_cache_spec.num_slot_blocks
        if len(self._slots) > 2 * max_slots:
            self._slots = {
                block_id: slot
                for block_id, slot in self._slots.items()
                if slot[0].ref_cnt > 0 or slot[0].block_hash is not None
            }

    def _slots_of(self, request_id: str) -> Iterator[list[KVCacheBlock]]:
        """All slots that are held for a request, its own one first."""
        if request_id in self.req_to_blocks:
            yield self.req_to_blocks[request_id]
        for state in self._unknown.get(request_id, ()):
            yield state.blocks
        if request_id in self._fork_states:
            yield self._fork_states[request_id].blocks
        for state in self.saved_states.held_states(request_id):
            yield state.blocks
        if request_id in self._read_slots:
            yield self._read_slots[request_id]
