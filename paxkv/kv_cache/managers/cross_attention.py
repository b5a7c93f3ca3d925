"""CrossAttentionManager: K and V of encoder tokens, which are all computed at admission."""

import sys
from collections.abc import Sequence
from typing import ClassVar

from paxkv.contracts.kv_cache_spec import KVCacheSpec, cdiv
from paxkv.contracts.protocols import CacheRequest
from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.block_hash import BlockHash
from paxkv.kv_cache.managers.device_block_work import DeviceBlockWork
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Block tables of cross-attention layers, allocated once at admission.

    This manager counts encoder tokens; other managers count decoder tokens. Its blocks are not
    cached, because block hashes cover the decoder's tokens. Forks share the blocks, because they
    are not written again.
    """

    is_written_by_decoder: ClassVar[bool] = False

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
        self._num_encoder_tokens: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        """See the base class.

        Args:
            num_tokens: Encoder tokens; 0 if the request has its blocks already.
        """
        # The computed blocks belong to the fork source, so none of them is free.
        num_present = len(self.get_blocks(request_id)) + len(new_computed_blocks)
        return max(cdiv(num_tokens, self.block_size) - num_present, 0)

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        # The blocks belong to the fork source. The two numbers count decoder tokens.
        super().allocate_new_computed_blocks(request_id, new_computed_blocks, 0, 0)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Sequence[KVCacheBlock]:
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        if new_blocks:
            self._num_encoder_tokens[request_id] = num_tokens
        return new_blocks

    def replace_shared_blocks(
        self, request_id: str, num_computed_tokens: int, num_tokens: int
    ) -> None:
        pass

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        pass

    def free(self, request_id: str, num_computed_tokens: int) -> None:
        # These blocks are never cached, so none must leave the prefix cache.
        super().free(request_id, 0)
        self._num_encoder_tokens.pop(request_id, None)

    def get_blocks_to_fork(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, *, is_final: bool
    ) -> list[KVCacheBlock] | None:
        return list(self.get_blocks(request_id))

    def get_max_tokens_before_allocate(
        self, request_id: str, *, are_cached_late: bool = False
    ) -> int:
        # Decoder tokens need no blocks of this group.
        return sys.maxsize

    def get_num_unused_slots(self, request_id: str, num_computed_tokens: int) -> int:
        # All encoder tokens are computed at once. A fork has no entry: its source counts the slots.
        num_encoder_tokens = self._num_encoder_tokens.get(request_id)
        if num_encoder_tokens is None:
            return 0
        return super().get_num_unused_slots(request_id, num_encoder_tokens)

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
        """Never called, because models with cross-attention have no prefix caching."""
        raise InvariantError(f"{cls.__name__} has no prefix hits.")
