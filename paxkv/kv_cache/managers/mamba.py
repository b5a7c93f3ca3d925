"""MambaManager: a block holds the state after its last token, which the next token reads."""

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

    Block i holds the state after `(i + 1) * block_size` tokens. The last block, until it is full,
    holds the state after the last token. A step writes the states at all block boundaries that it
    passes, so that they can be cached. The next step frees all of these blocks except the last.
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
        # States that the current step will write. Other requests of the step cannot read them.
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
            # Unlike K and V, states are read before any is written. The request must wait for the
            # next step, so demand more blocks than the pool has.
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
        # States of computed tokens were loaded, or an earlier step writes them. They may be cached
        # only now, because a load had to end or the last token of the block was not known.
        num_before = max(num_before, request.num_computed_tokens // self.block_size)
        super().cache_blocks(request, num_tokens)
        num_cached_blocks = self.num_cached_blocks.get(request.request_id, 0)
        if num_cached_blocks > num_before:
            self._block_ids_cached_this_step.update(
                block.block_id
                for block in self.req_to_blocks[request.request_id][num_before:num_cached_blocks]
            )

    def new_step_starts(self) -> None:
        """Ends the current step: later calls belong to the next step."""
        self._block_ids_cached_this_step.clear()

    def get_blocks_to_fork(
        self, request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> list[KVCacheBlock] | None:
        # A partly filled block holds only the state after the last computed token.
        if num_tokens % self.block_size and num_tokens != num_computed_tokens:
            return None
        return super().get_blocks_to_fork(request_id, num_tokens, num_computed_tokens)

    def get_num_tokens_before_block_work(
        self, request_id: str, *, are_cached_late: bool = False
    ) -> int:
        # The state of a full block must be kept, even if its tokens are not known yet.
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
        """See the base class. Finds the last cached state, with null blocks to its left."""
        # With EAGLE the hit is one block shorter. The dropped block need not be cached, because a
        # hit needs only its last state.
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
        # States need no clearing: they are written before they are read.
        pass

    def _num_slots(self, num_tokens_main_model: int) -> int:
        """Number of slots for `num_tokens_main_model` tokens.

        Each token that may be rejected needs a state, which is a block. Lookahead tokens do not
        count, because drafters have no states.
        """
        return num_tokens_main_model + self._num_speculative_tokens

    @property
    def _num_speculative_tokens(self) -> int:
        return self.kv_cache_spec.num_speculative_blocks * self.block_size

    def _is_written_in_this_step(self, block: KVCacheBlock) -> bool:
        return block.block_hash is not None and block.block_id in self._block_ids_cached_this_step
