"""KVCacheCoordinator: one block table manager per KV cache group, over one pool."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from paxkv.contracts.cache_request import CacheRequest
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.errors import ConfigError
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.block_hash import BlockHash
from paxkv.kv_cache.block_pool import BlockPool
from paxkv.kv_cache.spec_manager_map import get_manager_class

# Per KV cache group, blocks in the order of their tokens.
GroupBlocks = tuple[Sequence[KVCacheBlock], ...]


class KVCacheCoordinator(ABC):
    """Does for all groups what each group's manager does for one.

    Source: vLLM `v1/core/kv_cache_coordinator.py`.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, *, enable_caching: bool) -> None:
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(
            num_blocks=kv_cache_config.num_blocks, enable_caching=enable_caching
        )
        self.single_type_managers = tuple(
            get_manager_class(group.kv_cache_spec)(
                kv_cache_spec=group.kv_cache_spec,
                block_pool=self.block_pool,
                kv_cache_group_id=group_id,
            )
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        )

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: GroupBlocks
    ) -> int:
        """Free blocks that it takes to give the request room for `num_tokens` tokens."""
        return sum(
            manager.get_num_blocks_to_allocate(request_id, num_tokens, blocks)
            for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True)
        )

    def allocate_new_computed_blocks(
        self, request_id: str, new_computed_blocks: GroupBlocks
    ) -> None:
        """Starts the request's block tables with its prefix hits."""
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            manager.allocate_new_computed_blocks(request_id, blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> GroupBlocks:
        """Gives the request room for `num_tokens` tokens; returns the new blocks."""
        return tuple(
            manager.allocate_new_blocks(request_id, num_tokens)
            for manager in self.single_type_managers
        )

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Makes the blocks that the request's first `num_tokens` tokens fill findable."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_tokens)

    def free(self, request_id: str, num_computed_tokens: int) -> None:
        """Gives up the request's blocks; see `SingleTypeKVCacheManager.free`."""
        for manager in self.single_type_managers:
            manager.free(request_id, num_computed_tokens)

    def get_blocks(self, request_id: str) -> GroupBlocks:
        """The request's block tables."""
        return tuple(manager.get_blocks(request_id) for manager in self.single_type_managers)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group, leading blocks that every request holds."""
        return [
            manager.get_num_common_prefix_blocks(running_request_id)
            for manager in self.single_type_managers
        ]

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int]:
        """Cached blocks of the longest known prefix, and its number of tokens.

        Args:
            max_cache_hit_length: Most tokens that the hit may have.
        """


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups; nothing is shared."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(kv_cache_config, enable_caching=False)

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        pass

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int]:
        return tuple(() for _ in self.single_type_managers), 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group, with prefix caching."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(kv_cache_config, enable_caching=True)
        self.kv_cache_spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int]:
        hit_blocks = self.single_type_managers[0].find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_cache_hit_length,
            kv_cache_group_ids=(0,),
            block_pool=self.block_pool,
            kv_cache_spec=self.kv_cache_spec,
        )
        return hit_blocks, len(hit_blocks[0]) * self.kv_cache_spec.block_size


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig, *, enable_caching: bool
) -> KVCacheCoordinator:
    """The coordinator that fits the groups.

    Raises:
        ConfigError: There is no group, or several with prefix caching or unequal block sizes.
    """
    num_groups = len(kv_cache_config.kv_cache_groups)
    if num_groups == 0:
        raise ConfigError("the KV cache has no groups; a model without attention has no cache.")
    block_sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if len(block_sizes) > 1:
        raise ConfigError(f"KV cache groups must agree on block_size, got {sorted(block_sizes)}.")
    if not enable_caching:
        return KVCacheCoordinatorNoPrefixCache(kv_cache_config)
    if num_groups == 1:
        return UnitaryKVCacheCoordinator(kv_cache_config)
    raise ConfigError(
        f"prefix caching works with one KV cache group, got {num_groups}. "
        "Turn it off with enable_prefix_caching=False."
    )
