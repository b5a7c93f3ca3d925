"""Builds KV cache configs of small groups from the slow model's `Kind`s."""

from paxkv.contracts.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from tests.slow_model.attention_kinds import Kind

MAX_ENCODER_TOKENS = 5
_PAGE_BYTES = 8 * 2 * 4 * 4  # of 8 tokens, keys and values, width 4, float32


def full(block_size):
    return Kind("full", block_size)


def window(size, block_size):
    return Kind("window", block_size, size)


def chunk(size, block_size):
    return Kind("chunk", block_size, size)


def state(num_slot_blocks, block_size):
    return Kind("state", block_size, num_slot_blocks)


def cross(block_size):
    return Kind("cross", block_size)


def sink(size, block_size):
    return Kind("sink", block_size, size)


def make_spec(kind):
    """Chooses the number of heads by the block size, so that all pages have equal bytes."""
    if kind.name == "state":
        return MambaSpec(
            block_size=kind.block_size,
            page_bytes=_PAGE_BYTES,
            state_bytes=_PAGE_BYTES,
            blocks_per_state=1,
            num_parts=kind.size,
        )
    shape = {
        "block_size": kind.block_size,
        "num_kv_heads": 8 // kind.block_size,
        "head_size": 4,
        "dtype": "float32",
    }
    if kind.name == "window":
        return SlidingWindowSpec(sliding_window=kind.size, **shape)
    if kind.name == "chunk":
        return ChunkedLocalAttentionSpec(attention_chunk_size=kind.size, **shape)
    if kind.name == "cross":
        return CrossAttentionSpec(max_encoder_tokens=MAX_ENCODER_TOKENS, **shape)
    if kind.name == "sink":
        return SinkFullAttentionSpec(sink_len=kind.size, **shape)
    return FullAttentionSpec(**shape)


def make_config(kinds, num_blocks, *, hash_block_size=None):
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_groups=tuple(
            KVCacheGroupSpec(layer_names=(f"layer{i}",), kv_cache_spec=make_spec(kind))
            for i, kind in enumerate(kinds)
        ),
        hash_block_size=hash_block_size,
    )
