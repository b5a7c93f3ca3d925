"""Which manager keeps the block tables of which KV cache spec."""

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from paxkv.errors import ConfigError
from paxkv.kv_cache.full_attention import FullAttentionManager
from paxkv.kv_cache.single_type_manager import SingleTypeKVCacheManager

_SPEC_MANAGER_MAP: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
}


def get_manager_class(kv_cache_spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The manager class of a spec.

    Raises:
        ConfigError: This version has none.
    """
    manager_class = _SPEC_MANAGER_MAP.get(type(kv_cache_spec))
    if manager_class is None:
        raise ConfigError(
            f"no KV cache manager for {type(kv_cache_spec).__name__}; this version has "
            f"{', '.join(spec.__name__ for spec in _SPEC_MANAGER_MAP)}."
        )
    return manager_class
