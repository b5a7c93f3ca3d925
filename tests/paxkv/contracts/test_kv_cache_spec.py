"""Page sizes and group arithmetic, by hand."""

import pytest

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.errors import ConfigError


def spec(dtype: str = "float32") -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=dtype)


def test_page_holds_k_and_v_of_every_position() -> None:
    # K and V, 16 positions, 2 heads, 32 wide, 4 bytes: 2 * 16 * 2 * 32 * 4.
    assert spec().page_size_bytes == 8192
    assert spec("bfloat16").page_size_bytes == 4096


def test_last_block_of_a_request_may_be_partly_filled() -> None:
    assert spec().max_blocks_per_req(33) == 3
    assert spec().max_blocks_per_req(32) == 2


def test_rows_are_the_layers_of_the_largest_group() -> None:
    groups = tuple(
        KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec())
        for names in (("a", "b", "c"), ("d",))
    )
    assert KVCacheConfig(num_blocks=10, kv_cache_groups=groups).num_rows == 3


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float13"):
        spec("float13")
