"""Page sizes and numbers of blocks, computed by hand."""

import pytest

from paxkv.contracts.kv_cache_spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError
from paxkv.trace.header import SPEC_CLASSES

FIELDS = {"block_size": 16, "num_kv_heads": 2, "head_size": 32}


def spec(dtype: str = "float32", **fields: object) -> FullAttentionSpec:
    return FullAttentionSpec(**(FIELDS | fields), dtype=dtype)


def states(**fields: object) -> MambaSpec:
    sizes = {"page_bytes": 64, "state_bytes": 150, "blocks_per_state": 3}
    return MambaSpec(**({"block_size": 64} | sizes | fields))


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float16", 2),
        ("float8_e4m3fn", 1),
        ("int8", 1),
    ],
)
def test_page_holds_k_and_v_of_every_position(dtype: str, num_bytes: int) -> None:
    # K and V, 16 positions, 2 heads, 32 wide: 2 * 16 * 2 * 32 numbers.
    assert spec(dtype).page_size_bytes == 2048 * num_bytes


def test_v_heads_may_have_another_width() -> None:
    # 16 positions, 2 heads, 32 + 16 wide, 2 bytes.
    assert spec("bfloat16", head_size_v=16).page_size_bytes == 16 * 2 * 48 * 2


def test_latent_attention_stores_no_v() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype="bfloat16")
    assert latent.page_size_bytes == 16 * 576 * 2


def test_a_page_has_the_positions_of_one_of_the_ranks_that_share_a_block() -> None:
    assert spec("bfloat16", num_ranks=4).page_size_bytes == spec("bfloat16").page_size_bytes // 4
    latent = MLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=576, dtype="bfloat16", num_ranks=2
    )
    assert latent.page_size_bytes == 16 * 576 * 2
    with pytest.raises(ConfigError, match="num_ranks must divide block_size=16, got 3"):
        spec("bfloat16", num_ranks=3)


def test_page_size_can_be_padded_but_not_reduced() -> None:
    assert spec("bfloat16", page_size_padded=8192).page_size_bytes == 8192
    with pytest.raises(ConfigError, match="page_size_padded=100 must be at least"):
        spec("bfloat16", page_size_padded=100)


def test_pages_must_hold_the_whole_state() -> None:
    assert states(state_bytes=192).page_size_bytes == 64
    with pytest.raises(ConfigError, match="193 bytes does not fit into 3 pages of 64 bytes"):
        states(state_bytes=193)
    with pytest.raises(ConfigError, match="num_parts=0 and blocks_per_state=3"):
        states(num_parts=0)


def test_last_block_of_a_request_may_be_partly_full() -> None:
    assert spec().max_blocks_per_req(33) == 3
    assert spec().max_blocks_per_req(32) == 2


# max_model_len 1000 and steps of 100 tokens, blocks of 16.
@pytest.mark.parametrize(
    ("spec_class", "fields", "expected"),
    [
        (FullAttentionSpec, {}, 63),
        (SinkFullAttentionSpec, {"sink_len": 16}, 63),
        # 63 tokens before the step and 100 in it: 11 blocks, plus one if they begin within a block.
        (SlidingWindowSpec, {"sliding_window": 64}, 12),
        # At most the blocks of the whole request.
        (SlidingWindowSpec, {"sliding_window": 2000}, 63),
        (ChunkedLocalAttentionSpec, {"attention_chunk_size": 128}, 16),
        # 150 encoder tokens, whatever the decoder's length.
        (CrossAttentionSpec, {"max_encoder_tokens": 150}, 10),
    ],
)
def test_max_held_blocks_of_each_kind_of_attention(
    spec_class: type[AttentionSpec], fields: dict[str, int], expected: int
) -> None:
    made = spec_class(**FIELDS, **fields, dtype="float32")
    assert made.max_held_blocks(max_model_len=1000, max_num_batched_tokens=100) == expected


def test_request_of_any_length_holds_one_slot_of_blocks() -> None:
    made = states(num_parts=4)
    assert made.max_held_blocks(max_model_len=1, max_num_batched_tokens=1) == 12
    assert made.max_held_blocks(max_model_len=1000, max_num_batched_tokens=100) == 12
    assert made.max_blocks_per_req(1000) == 12


def group(*names: str, **fields: object) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec(**fields))


def test_number_of_rows_is_that_of_the_largest_group() -> None:
    config = KVCacheConfig(num_blocks=10, kv_cache_groups=(group("a", "b", "c"), group("d")))
    assert config.num_rows == 3


def test_parts_of_a_slot_share_rows() -> None:
    # Layers a, c and e are in the rows of the first part; b and d in those of the second.
    of_states = KVCacheGroupSpec(layer_names=tuple("abcde"), kv_cache_spec=states(num_parts=2))
    assert of_states.num_rows == 3
    config = KVCacheConfig(num_blocks=10, kv_cache_groups=(group("f", "g"), of_states))
    assert (config.num_rows, config.has_states, config.can_share_prefixes) == (3, True, True)


def test_hash_block_size_divides_every_block_size() -> None:
    groups = (group("a", block_size=48), group("b", block_size=32))
    assert KVCacheConfig(num_blocks=10, kv_cache_groups=groups).resolved_hash_block_size == 16
    finer = KVCacheConfig(num_blocks=10, kv_cache_groups=groups, hash_block_size=8)
    assert finer.resolved_hash_block_size == 8


def test_hash_block_size_0_is_rejected() -> None:
    with pytest.raises(ConfigError, match="hash_block_size must be at least 1, got 0"):
        KVCacheConfig(num_blocks=10, kv_cache_groups=(group("a"),), hash_block_size=0)


# No op supports a cache of the second dtype.
@pytest.mark.parametrize("dtype", ["float13", "float8_e5m2"])
def test_unknown_dtypes_are_rejected(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"must be one of .*'int8'.*, got '{dtype}'"):
        spec(dtype)


def test_layer_with_window_and_chunks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="sliding_window=8"):
        spec(sliding_window=8, attention_chunk_size=8)


def test_every_kind_has_a_name_of_its_own() -> None:
    kinds = {spec_class.kind for spec_class in SPEC_CLASSES.values()}
    assert len(kinds) == len(SPEC_CLASSES)
