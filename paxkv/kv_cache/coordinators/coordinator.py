"""KVCacheCoordinator: one block table manager per KV cache group, over one pool."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from paxkv.contracts.kv_cache_spec import KVCacheConfig, KVCacheSpec
from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import BlockHash, with_block_size
from paxkv.kv_cache.managers.device_block_work import DeviceBlockWork
from paxkv.kv_cache.managers.mamba import MambaManager
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.managers.spec_manager_map import get_manager_class
from paxkv.kv_cache.managers.windowed_manager import WindowedManager
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool

# Per KV cache group, blocks in the order of their tokens.
GroupBlocks = tuple[Sequence[KVCacheBlock], ...]


class KVCacheCoordinator(ABC):
    """Calls the block table managers of all groups.

    Args:
        use_eagle: Drop the last block of every prefix hit.
        observers: Receive every change of the pool's blocks.

    Source: vLLM `v1/core/kv_cache_coordinator.py`.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        enable_caching: bool,
        use_eagle: bool = False,
        observers: Iterable[BlockPoolObserver] = (),
    ) -> None:
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.hash_block_size = kv_cache_config.resolved_hash_block_size
        self.block_pool = BlockPool(
            num_blocks=kv_cache_config.num_blocks,
            enable_caching=enable_caching,
            hash_block_size=self.hash_block_size,
            observers=observers,
        )
        self.device_block_work = DeviceBlockWork()
        self.single_type_managers = tuple(
            get_manager_class(group.kv_cache_spec)(
                kv_cache_spec=group.kv_cache_spec,
                block_pool=self.block_pool,
                kv_cache_group_id=group_id,
                device_block_work=self.device_block_work,
            )
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        )
        self._windowed_managers = tuple(
            manager for manager in self.single_type_managers if isinstance(manager, WindowedManager)
        )
        self.state_managers = tuple(
            manager for manager in self.single_type_managers if isinstance(manager, MambaManager)
        )
        # The tables of groups with equal specs have equal lengths, and free and cache blocks at
        # the same indices. So the first of these groups can answer for all.
        self.managers_by_spec: dict[KVCacheSpec, list[SingleTypeKVCacheManager]] = {}
        for manager in self.single_type_managers:
            self.managers_by_spec.setdefault(manager.kv_cache_spec, []).append(manager)
        self._managers_of_each_spec = tuple(
            managers[0] for managers in self.managers_by_spec.values()
        )

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Frees blocks that no token from `num_computed_tokens` on reads."""
        for manager in self._windowed_managers:
            manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: GroupBlocks,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        """Number of free blocks that the request needs to hold `num_tokens` tokens.

        Args:
            num_encoder_tokens: Tokens that cross-attention groups must hold.
            total_computed_tokens: See `SingleTypeKVCacheManager.get_num_blocks_to_allocate`.
        """
        num_blocks = 0
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            num_blocks += manager.get_num_blocks_to_allocate(
                request_id,
                num_tokens if manager.is_written_by_decoder else num_encoder_tokens,
                blocks,
                total_computed_tokens,
                num_tokens_main_model,
            )
        return num_blocks

    def get_num_blocks_for_full_sequence(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: GroupBlocks,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_new_tokens: int,
    ) -> int:
        """Number of free blocks needed to compute `num_tokens`, at `num_new_tokens` per step."""
        num_blocks = 0
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            num_blocks += manager.get_num_blocks_for_full_sequence(
                request_id,
                num_tokens if manager.is_written_by_decoder else num_encoder_tokens,
                blocks,
                total_computed_tokens,
                num_new_tokens,
            )
        return num_blocks

    def plan_slots(
        self,
        request: CacheRequest,
        new_computed_blocks: GroupBlocks,
        num_computed_tokens: int,
        num_spare_blocks: int,
    ) -> bool:
        """Decides whether the request writes new slots of states; see `MambaManager.plan_slot`."""
        takes_slot = False
        for manager in self.state_managers:
            num_taken = manager.plan_slot(
                request,
                new_computed_blocks[manager.kv_cache_group_id],
                num_computed_tokens,
                num_spare_blocks,
            )
            if num_taken is not None:
                num_spare_blocks -= num_taken
                takes_slot = True
        return takes_slot

    def finish_step(self) -> None:
        """Releases blocks that only the step which has been decided needs."""
        for manager in self.state_managers:
            manager.finish_step()

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: GroupBlocks,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Starts the request's block tables; see `SingleTypeKVCacheManager`."""
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            manager.allocate_new_computed_blocks(
                request_id, blocks, num_local_computed_tokens, num_external_computed_tokens
            )

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> GroupBlocks:
        """Allocates blocks until the request has slots for `num_tokens` tokens; returns them.

        Shared blocks that the request will write into are replaced by copies.
        """
        new_blocks: list[Sequence[KVCacheBlock]] = []
        for manager in self.single_type_managers:
            manager.replace_shared_blocks(request_id, total_computed_tokens, num_tokens)
            new_blocks.append(
                manager.allocate_new_blocks(
                    request_id,
                    num_tokens if manager.is_written_by_decoder else num_encoder_tokens,
                    num_tokens_main_model,
                )
            )
        return tuple(new_blocks)

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Adds the blocks that the request's first `num_tokens` tokens fill to the prefix cache."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_tokens)

    def free(self, request_id: str, num_computed_tokens: int) -> None:
        """Frees the request's blocks; see `SingleTypeKVCacheManager.free`."""
        for manager in self.single_type_managers:
            manager.free(request_id, num_computed_tokens)
        self.device_block_work.drop_freed_targets()

    def get_blocks(self, request_id: str) -> GroupBlocks:
        """The request's block tables."""
        return tuple(manager.get_blocks(request_id) for manager in self.single_type_managers)

    def get_first_step_blocks(self, request_id: str) -> GroupBlocks:
        """The request's block tables, in the form of `NewRequestData`."""
        return tuple(m.get_first_step_blocks(request_id) for m in self.single_type_managers)

    def get_blocks_to_fork(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, *, is_final: bool
    ) -> GroupBlocks | None:
        """Blocks that a fork needs; None if a group does not hold one of them any more."""
        forked_blocks: list[Sequence[KVCacheBlock]] = []
        for manager in self.single_type_managers:
            blocks = manager.get_blocks_to_fork(
                request_id, num_tokens, num_computed_tokens, is_final=is_final
            )
            if blocks is None:
                return None
            forked_blocks.append(blocks)
        return tuple(forked_blocks)

    def get_max_tokens_before_allocate(
        self, request_id: str, *, are_cached_late: bool = False
    ) -> int:
        """The smallest result of all groups; see `SingleTypeKVCacheManager`."""
        return min(
            [
                manager.get_max_tokens_before_allocate(request_id, are_cached_late=are_cached_late)
                for manager in self._managers_of_each_spec
            ]
        )

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group, the number of leading blocks that every request holds."""
        return [
            manager.get_num_common_prefix_blocks(running_request_id)
            for manager in self.single_type_managers
        ]

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int]:
        """Cached blocks of the longest cached prefix, and its number of tokens.

        Args:
            max_cache_hit_length: Largest number of tokens that the hit may have.
        """

    def find_state_to_save(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int, num_hit_tokens: int
    ) -> int:
        """Number of tokens of the hit that only states have prevented; 0 if there is none.

        Args:
            num_hit_tokens: The result of `find_longest_cache_hit`.
        """
        return 0


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """For any number of groups, without prefix caching."""

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        pass

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int]:
        return tuple(() for _ in self.single_type_managers), 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """For one group, with prefix caching."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int]:
        manager = self.single_type_managers[0]
        hit_blocks = manager.find_longest_cache_hit(
            block_hashes=with_block_size(block_hashes, self.hash_block_size, manager.block_size),
            max_length=max_cache_hit_length,
            kv_cache_group_ids=(0,),
            block_pool=self.block_pool,
            kv_cache_spec=manager.kv_cache_spec,
            use_eagle=self.use_eagle,
            alignment_tokens=manager.block_size,
        )
        return hit_blocks, len(hit_blocks[0]) * manager.block_size
