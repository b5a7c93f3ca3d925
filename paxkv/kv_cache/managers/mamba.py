"""MambaManager: a block is the state after its last token; the next token reads the last one."""

from collections.abc import Iterable, Sequence

from paxkv.contracts.kv_cache_spec import KVCacheSpec, MambaSpec
from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import BlockHash
from paxkv.kv_cache.managers.device_block_work import DeviceBlockWork
from paxkv.kv_cache.managers.windowed_manager import WindowedManager
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool


class MambaManager(WindowedManager):
    """Block tables of Mamba and linear attention layers.

    Block i holds the state after `(i + 1) * block_size` tokens; the last one, until it is full, the
    state after the last token. A step writes the states at all block boundaries that it passes,
    so that they can be found, and the next step gives up all but the last.
    """

    kv_cache_spec: MambaSpec

    def __init__(
        self,
        *,
        kv_cache_spec: MambaSpec,
        block_pool: BlockPool,
        kv_cache_group_id: int,
        device_block_work: DeviceBlockWork | None = None,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> None:
        super().__init__(
            kv_cache_spec=kv_cache_spec,
            block_pool=block_pool,
            kv_cache_group_id=kv_cache_group_id,
            device_block_work=device_block_work,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
        )
        # States that the step being decided will write: none of its requests can read them yet.
        self._block_ids_cached_this_step: set[int] = set()

    @classmethod
    def num_skipped_tokens(cls, kv_cache_spec: KVCacheSpec, num_computed_tokens: int) -> int:
        # Only the state after the last token is read.
        return max(num_computed_tokens - 1, 0)

    def get_num_tokens_skipping(self, num_blocks: int) -> int:
        return num_blocks * self.block_size + 1

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        if new_computed_blocks and self._is_written_in_this_step(new_computed_blocks[-1]):
            # Layers read states before they write any, unlike K and V. The request has to wait
            # for the next step, which is what more blocks than there are make it do.
            return self.block_pool.num_blocks
        return super().get_num_blocks_to_allocate(
            request_id,
            self._num_slots(num_tokens_main_model),
            new_computed_blocks,
            total_computed_tokens,
            num_tokens_main_model,
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Sequence[KVCacheBlock]:
        return super().allocate_new_blocks(
            request_id, self._num_slots(num_tokens_main_model), num_tokens_main_model
        )

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        num_before = self.num_cached_blocks.get(request.request_id, 0)
        # States of computed tokens are there, or come with a step sent off, though they be cached
        # only now: those that were loaded, or whose last token was not known.
        num_before = max(num_before, request.num_computed_tokens // self.block_size)
        super().cache_blocks(request, num_tokens)
        num_cached_blocks = self.num_cached_blocks.get(request.request_id, 0)
        if num_cached_blocks > num_before:
            self._block_ids_cached_this_step.update(
                block.block_id
                for block in self.req_to_blocks[request.request_id][num_before:num_cached_blocks]
            )

    def new_step_starts(self) -> None:
        """All that was decided so far is sent to the device before what comes now."""
        self._block_ids_cached_this_step.clear()

    def get_blocks_to_fork(
        self, request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> list[KVCacheBlock] | None:
        # Within a block the state is that of the last token computed, and of no earlier one.
        if num_tokens % self.block_size and num_tokens != num_computed_tokens:
            return None
        return super().get_blocks_to_fork(request_id, num_tokens, num_computed_tokens)

    def get_num_tokens_before_block_work(
        self, request_id: str, *, are_cached_late: bool = False
    ) -> int:
        # A block that becomes full is a state to be kept, whatever its tokens are.
        num_slots = len(self.get_blocks(request_id)) * self.block_size
        return min(
            super().get_num_tokens_before_block_work(request_id),
            num_slots - self._num_speculative_tokens,
        )

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
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """See the base; the last state in reach, with null blocks to its left."""
        # The dropped block leaves no trace: a state says nothing about the one behind it.
        return super().find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_length - kv_cache_spec.block_size if use_eagle else max_length,
            kv_cache_group_ids=kv_cache_group_ids,
            block_pool=block_pool,
            kv_cache_spec=kv_cache_spec,
            use_eagle=False,
            alignment_tokens=alignment_tokens,
        )

    def _record_new_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        # A state is written before it is read; only attention reads slots that it then masks.
        pass

    def _num_slots(self, num_tokens_main_model: int) -> int:
        """What a request needs for so many tokens: lookahead is for drafters, which have no states.

        Tokens not yet accepted need a state each, which is a block.
        """
        return num_tokens_main_model + self._num_speculative_tokens

    @property
    def _num_speculative_tokens(self) -> int:
        return self.kv_cache_spec.num_speculative_blocks * self.block_size

    def _is_written_in_this_step(self, block: KVCacheBlock) -> bool:
        return block.block_hash is not None and block.block_id in self._block_ids_cached_this_step
