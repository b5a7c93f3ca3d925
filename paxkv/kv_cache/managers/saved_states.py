"""SavedStates: slots whose states later requests can find in the prefix cache."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import (
    BlockHashWithGroupId,
    make_block_hash_with_group_id,
)
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool


@dataclasses.dataclass(slots=True, eq=False)
class SavedState:
    """A slot with the state after the first `num_tokens` tokens of a request.

    Args:
        key: The hash of the slot's first block, while the prefix cache has it.
    """

    request: CacheRequest
    blocks: list[KVCacheBlock]
    num_tokens: int
    key: BlockHashWithGroupId | None = None

    @property
    def is_findable(self) -> bool:
        return self.key is not None and self.blocks[0].block_hash == self.key


class SavedStates:
    """The saved states of one KV cache group.

    The first block of a saved slot has the hash of the tokens. Blocks of a slot are freed in their
    order, so the pool allocates the first one first: a slot that has lost a block has no hash.

    A request that decodes writes its slots in turn: it keeps its newest two states, and its next
    slot is that of the older one. These rolling states are held while there is memory for them.
    They enter the prefix cache when the request stops holding them. Until then only the request
    itself has their tokens, so a look-up would not find them.

    Args:
        block_size: Tokens between two positions at which a state can be saved.
        num_slot_blocks: Blocks of a slot.

    Attributes:
        max_blocks: Largest number of blocks that saved slots may take. Beyond it, the least
            recently used states leave the prefix cache.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        *,
        kv_cache_group_id: int,
        block_size: int,
        num_slot_blocks: int,
    ) -> None:
        self._block_pool = block_pool
        self._kv_cache_group_id = kv_cache_group_id
        self._block_size = block_size
        self._num_slot_blocks = num_slot_blocks
        self.max_blocks = block_pool.num_blocks
        # By the id of the first block, the least recently used first. If the block loses its hash,
        # the entry stays, and counts for `max_blocks` until it becomes the first one.
        self._states: OrderedDict[int, SavedState] = OrderedDict()
        # Request id -> states that it keeps while it decodes, oldest first. Their slots are held.
        self._rolling: dict[str, list[SavedState]] = {}

    def find(self, first_block: KVCacheBlock) -> SavedState:
        """The saved state whose slot starts with a block that a look-up found."""
        return self._states[first_block.block_id]

    def find_all(self) -> list[SavedState]:
        """All states that a look-up can find."""
        return [state for state in self._states.values() if state.is_findable]

    def contains(self, request: CacheRequest, num_tokens: int) -> bool:
        """Whether a look-up finds the state after the request's first `num_tokens` tokens."""
        num_hashes = num_tokens // self._block_pool.hash_block_size
        block_hash = request.block_hashes[num_hashes - 1]
        key = make_block_hash_with_group_id(block_hash, self._kv_cache_group_id)
        return key in self._block_pool.cached_block_hash_to_block

    def touch(self, state: SavedState) -> None:
        """Makes a state the most recently used one."""
        self._states.move_to_end(state.blocks[0].block_id)

    def held_states(self, request_id: str) -> Sequence[SavedState]:
        """States that are held for a request that decodes, oldest first."""
        return self._rolling.get(request_id, ())

    def all_held_slots(self) -> Iterator[list[KVCacheBlock]]:
        for states in self._rolling.values():
            for state in states:
                yield state.blocks

    def holder_ids(self) -> set[str]:
        """Requests for which slots are held."""
        return set(self._rolling)

    def add(self, state: SavedState) -> None:
        """Adds a state to the prefix cache, unless it is there already."""
        first = state.blocks[0]
        is_added = self._block_pool.cache_block(
            request=state.request,
            block=first,
            num_tokens=state.num_tokens,
            block_size=self._block_size,
            kv_cache_group_id=self._kv_cache_group_id,
        )
        if not is_added:
            return
        state.key = first.block_hash
        self._states[first.block_id] = state
        self._states.move_to_end(first.block_id)
        self._drop_least_used()

    def hold(self, state: SavedState) -> None:
        """Keeps the slot of a state, which the caller holds, for a request that decodes."""
        self._rolling.setdefault(state.request.request_id, []).append(state)

    def remove(self, state: SavedState) -> None:
        """Removes a state from the prefix cache."""
        del self._states[state.blocks[0].block_id]
        self._block_pool.evict(state.blocks[:1])

    def can_replace(self, request_id: str) -> bool:
        """Whether `pop_replaceable` finds a slot."""
        return len(self._rolling.get(request_id, ())) > 1

    def pop_replaceable(self, request_id: str) -> list[KVCacheBlock]:
        """Removes the older state of a decoding request. The caller then holds its slot.

        The newest state stays, because the state that the request saves next may be of tokens past
        its end.
        """
        return self._rolling[request_id].pop(0).blocks

    def pop_held(self, request_id: str) -> list[SavedState]:
        """Stops holding the states of a request, oldest first; the caller frees their slots."""
        return self._rolling.pop(request_id, [])

    def pop_any_held(self) -> SavedState | None:
        """Stops holding the oldest state of some request, which enters the prefix cache.

        The caller frees its slot. None if there is none.
        """
        for request_id, states in self._rolling.items():
            state = states.pop(0)
            if not states:
                del self._rolling[request_id]
            self.add(state)
            return state
        return None

    def _drop_least_used(self) -> None:
        max_states = self.max_blocks // self._num_slot_blocks
        while len(self._states) > max_states:
            _, state = self._states.popitem(last=False)
            if state.is_findable:
                self._block_pool.evict(state.blocks[:1])
