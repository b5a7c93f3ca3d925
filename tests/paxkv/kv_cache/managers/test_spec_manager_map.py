"""Every kind of spec has a manager class."""

import pytest

from paxkv.contracts.kv_cache_spec import KVCacheSpec, MLAAttentionSpec
from paxkv.errors import ConfigError
from paxkv.kv_cache.managers.chunked_local import ChunkedLocalAttentionManager
from paxkv.kv_cache.managers.cross_attention import CrossAttentionManager
from paxkv.kv_cache.managers.full_attention import FullAttentionManager
from paxkv.kv_cache.managers.mamba import MambaManager
from paxkv.kv_cache.managers.sink_full_attention import SinkFullAttentionManager
from paxkv.kv_cache.managers.sliding_window import SlidingWindowManager
from paxkv.kv_cache.managers.spec_manager_map import get_manager_class
from tests.paxkv.kv_cache.cache_fakes import HEADS, chunked, cross, full, sinks, states, window


@pytest.mark.parametrize(
    ("spec", "manager_class"),
    [
        (full(), FullAttentionManager),
        (MLAAttentionSpec(block_size=4, **HEADS), FullAttentionManager),
        (window(8), SlidingWindowManager),
        (chunked(8), ChunkedLocalAttentionManager),
        (states(), MambaManager),
        (cross(), CrossAttentionManager),
        (sinks(4), SinkFullAttentionManager),
    ],
)
def test_each_kind_of_spec_has_a_manager(spec, manager_class):
    assert get_manager_class(spec) is manager_class


def test_an_unknown_kind_of_spec_is_rejected():
    with pytest.raises(ConfigError, match="no KV cache manager for KVCacheSpec; this version has"):
        get_manager_class(KVCacheSpec(block_size=4))
