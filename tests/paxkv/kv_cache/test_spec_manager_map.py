"""Every kind of spec has its manager, and no other."""

import pytest

from paxkv.contracts.kv_cache_spec import KVCacheSpec, MLAAttentionSpec
from paxkv.errors import ConfigError
from paxkv.kv_cache.chunked_local import ChunkedLocalAttentionManager
from paxkv.kv_cache.cross_attention import CrossAttentionManager
from paxkv.kv_cache.full_attention import FullAttentionManager
from paxkv.kv_cache.mamba import MambaManager
from paxkv.kv_cache.sink_full_attention import SinkFullAttentionManager
from paxkv.kv_cache.sliding_window import SlidingWindowManager
from paxkv.kv_cache.spec_manager_map import get_manager_class
from tests.paxkv.kv_cache.cache_fakes import HEADS, chunked, cross, full, mamba, sinks, window


@pytest.mark.parametrize(
    ("spec", "manager_class"),
    [
        (full(), FullAttentionManager),
        (MLAAttentionSpec(block_size=4, **HEADS), FullAttentionManager),
        (window(8), SlidingWindowManager),
        (chunked(8), ChunkedLocalAttentionManager),
        (mamba(), MambaManager),
        (cross(), CrossAttentionManager),
        (sinks(4), SinkFullAttentionManager),
    ],
)
def test_each_kind_has_its_manager(spec, manager_class):
    assert get_manager_class(spec) is manager_class


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="no KV cache manager for KVCacheSpec; this version has"):
        get_manager_class(KVCacheSpec(block_size=4))
