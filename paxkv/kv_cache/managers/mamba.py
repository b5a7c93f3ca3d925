"""MambaManager: the slots in which requests keep the states of recurrent layers."""

import sys
from collections.abc import Sequence
from typing import ClassVar

from paxkv.contracts.kv_cache_spec import KVCacheSpec, MambaSpec
from paxkv.contracts.protocols import CacheRequest
from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.block_hash import BlockHash
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool


class MambaManager(SingleTypeKVCacheManager):
    """One slot per request: allocated at admission, written in place, freed as a whole.

    A slot holds the state after the request's last computed token. No other request can read it, so
    there are no prefix hits and no forks.
    """

    holds_tokens: ClassVar[bool] = False
    kv_cache_spec: MambaSpec

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        return 0 if request_id in self.req_to_blocks else self.kv_cache_spec.num_slot_blocks

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """See the base class.

        Raises:
            InvariantError: Another request computed the tokens, so their state is missing.
        """
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        if num_tokens > 0:
            raise InvariantError(f"{request_id=} has no state of its first {num_tokens} tokens.")

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Sequence[KVCacheBlock]:
        if request_id in self.req_to_blocks:
            return ()
        blocks = self.block_pool.get_new_blocks(self.kv_cache_spec.num_slot_blocks)
        self.num_held_blocks += len(blocks)
        self.req_to_blocks[request_id] = list(blocks)
        return blocks

    def replace_shared_blocks(
        self, request_id: str, num_computed_tokens: int, num_tokens: int
    ) -> None:
        pass

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        pass

    def get_blocks_to_fork(
        self, request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> list[KVCacheBlock] | None:
        return None

    def get_max_tokens_before_allocate(
        self, request_id: str, *, are_cached_late: bool = False
    ) -> int:
        # A request that has its slot needs no further blocks.
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
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Never called, because models with states have no prefix caching."""
        raise InvariantError(f"{cls.__name__} has no prefix hits.")

    def check_invariants(self) -> None:
        """See the base class. Each slot is complete, and no two requests share a block."""
        super().check_invariants()
        num_slot_blocks = self.kv_cache_spec.num_slot_blocks
        for request_id, blocks in self.req_to_blocks.items():
            if len(blocks) != num_slot_blocks:
                raise InvariantError(
                    f"{request_id=} has {len(blocks)} blocks; a slot has {num_slot_blocks}."
                )
            if shared := [block for block in blocks if block.ref_cnt != 1]:
                raise InvariantError(f"{request_id=} shares blocks of its slot: {shared}.")
