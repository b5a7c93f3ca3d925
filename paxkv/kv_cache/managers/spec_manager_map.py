"""Maps KV cache specs to block table manager classes."""

from paxkv.contracts.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError
from paxkv.kv_cache.managers.chunked_local import ChunkedLocalAttentionManager
from paxkv.kv_cache.managers.cross_attention import CrossAttentionManager
from paxkv.kv_cache.managers.full_attention import FullAttentionManager
from paxkv.kv_cache.managers.mamba import MambaManager
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.managers.sink_full_attention import SinkFullAttentionManager
from paxkv.kv_cache.managers.sliding_window import SlidingWindowManager

_SPEC_MANAGER_MAP: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
}


def get_manager_class(kv_cache_spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The manager class of a spec.

    Raises:
        ConfigError: This version has no manager for the spec.
    """
    manager_class = _SPEC_MANAGER_MAP.get(type(kv_cache_spec))
    if manager_class is None:
        raise ConfigError(
            f"no KV cache manager for {type(kv_cache_spec).__name__}; this version has "
            f"{', '.join(spec.__name__ for spec in _SPEC_MANAGER_MAP)}."
        )
    return manager_class
