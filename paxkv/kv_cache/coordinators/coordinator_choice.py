"""Chooses the coordinator class for a KV cache."""

from collections.abc import Iterable

from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.errors import ConfigError
from paxkv.kv_cache.coordinators.coordinator import (
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from paxkv.kv_cache.coordinators.hybrid_coordinator import HybridKVCacheCoordinator
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    *,
    enable_caching: bool,
    use_eagle: bool = False,
    observers: Iterable[BlockPoolObserver] = (),
) -> KVCacheCoordinator:
    """Builds the coordinator for the groups; see `KVCacheCoordinator` for the arguments.

    There is no prefix caching if the groups cannot share prefixes
    (`KVCacheConfig.can_share_prefixes`).

    Raises:
        ConfigError: There is no group, or `hash_block_size` does not divide every block size.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("the KV cache has no groups; it needs at least one.")
    hash_block_size = kv_cache_config.resolved_hash_block_size
    block_sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if enable_caching and any(block_size % hash_block_size for block_size in block_sizes):
        raise ConfigError(
            f"{hash_block_size=} must divide the block size of every KV cache group, got "
            f"{block_sizes}."
        )
    enable_caching = enable_caching and kv_cache_config.can_share_prefixes
    coordinator_class: type[KVCacheCoordinator] = KVCacheCoordinatorNoPrefixCache
    if enable_caching:
        coordinator_class = (
            UnitaryKVCacheCoordinator if len(groups) == 1 else HybridKVCacheCoordinator
        )
    return coordinator_class(
        kv_cache_config,
        enable_caching=enable_caching,
        use_eagle=use_eagle,
        observers=observers,
    )
