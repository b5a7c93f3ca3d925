"""KV cache formats: the data that one layer stores per block, and the groups of layers."""

import dataclasses
import math
from typing import ClassVar

from paxkv.errors import ConfigError

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
}


def cdiv(numerator: int, denominator: int) -> int:
    """Division rounded up, for a numerator of at least 0 and a denominator of at least 1."""
    return -(-numerator // denominator)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Format of one layer's KV memory; a block holds `block_size` token positions.

    Attributes:
        kind: Name of the subclass in KV events, as in vLLM, and in the inspector.

    Source: vLLM `v1/kv_cache_interface.py`.
    """

    kind: ClassVar[str]

    block_size: int

    @property
    def page_tokens(self) -> int:
        """Token positions of a block on one device."""
        return self.block_size

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError(f"{type(self).__name__} must define page_size_bytes")

    def max_blocks_per_req(self, max_model_len: int) -> int:
        """Largest number of entries of a request's block table, including null blocks."""
        return cdiv(max_model_len, self.block_size)

    def max_held_blocks(self, *, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Largest number of blocks that one request holds at once in this layer's group.

        Args:
            max_num_batched_tokens: Largest number of the request's tokens that one step computes.
        """
        return self.max_blocks_per_req(max_model_len)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """K and V of `num_kv_heads` heads, stored as `dtype`.

    Args:
        head_size: Width of a K head, and of a V head unless `head_size_v` is set.
        page_size_padded: Padded size of a page in bytes, so that all layers' pages have equal
            sizes.
        num_ranks: Devices that share the positions of a block (context parallelism). A page has
            `block_size // num_ranks` of them.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int | None = None
    page_size_padded: int | None = None
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.block_size % self.num_ranks:
            raise ConfigError(
                f"num_ranks must divide block_size={self.block_size}, got {self.num_ranks}."
            )
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"KV cache dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}."
            )
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise ConfigError(
                f"page_size_padded={self.page_size_padded} must be at least the "
                f"{self.real_page_size_bytes} bytes that a page needs."
            )

    @property
    def page_tokens(self) -> int:
        return self.block_size // self.num_ranks

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block of one layer on one device, without padding."""
        head_size_v = self.head_size if self.head_size_v is None else self.head_size_v
        bytes_per_token = self.num_kv_heads * (self.head_size + head_size_v)
        return self.page_tokens * bytes_per_token * DTYPE_BYTES[self.dtype]

    @property
    def page_size_bytes(self) -> int:
        if self.page_size_padded is not None:
            return self.page_size_padded
        return self.real_page_size_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to every earlier one, so a request keeps all its blocks.

    Args:
        sliding_window: Set if the layer attends only to a window, but keeps all its blocks, so
            that all layers of the model can be in one group.
        attention_chunk_size: Like `sliding_window`, for chunked local attention.
    """

    kind: ClassVar[str] = "full_attention"

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        # super() without arguments fails here, because `slots=True` creates the class again.
        AttentionSpec.__post_init__(self)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ConfigError(
                f"a layer must not have both a window and chunks, got {self.sliding_window=} and "
                f"{self.attention_chunk_size=}."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent of `head_size` per token, and no V."""

    kind: ClassVar[str] = "mla_attention"

    @property
    def real_page_size_bytes(self) -> int:
        return self.page_tokens * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to itself and the `sliding_window - 1` tokens before it."""

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int

    def max_held_blocks(self, *, max_model_len: int, max_num_batched_tokens: int) -> int:
        num_tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        # One more block, because the window may begin in the middle of a block.
        return min(cdiv(num_tokens, self.block_size) + 1, self.max_blocks_per_req(max_model_len))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token attends to itself and to earlier tokens of its chunk of `attention_chunk_size`."""

    kind: ClassVar[str] = "chunked_local_attention"

    attention_chunk_size: int

    def max_held_blocks(self, *, max_model_len: int, max_num_batched_tokens: int) -> int:
        num_tokens = min(self.attention_chunk_size + max_num_batched_tokens, max_model_len)
        return min(cdiv(num_tokens, self.block_size) + 1, self.max_blocks_per_req(max_model_len))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """States of fixed size. A request keeps them in a slot of blocks, whatever its length.

    A slot has `num_parts` parts of `blocks_per_state` blocks each. The state of the group's layer i
    is in the blocks of part `i % num_parts`, in row `i // num_parts`. So one block table serves all
    layers of the group, even if a block has fewer rows than the group has layers.

    Example: 5 layers, 2 parts, 3 blocks per state -> slots of 6 blocks. Layers 0, 2 and 4 are in
    rows 0 to 2 of the first 3 blocks, and layers 1 and 3 in rows 0 and 1 of the last 3.

    Args:
        block_size: Tokens between two positions at which a prefix hit may end. The blocks of a slot
            hold no token positions.
        page_bytes: Bytes of one block of one layer.
        state_bytes: Bytes that a layer's state fills in its pages; the rest is padding.
    """

    kind: ClassVar[str] = "state"

    page_bytes: int
    state_bytes: int
    blocks_per_state: int
    num_parts: int = 1

    def __post_init__(self) -> None:
        if self.num_parts < 1 or self.blocks_per_state < 1:
            raise ConfigError(
                f"a slot must have at least one block, got num_parts={self.num_parts} and "
                f"blocks_per_state={self.blocks_per_state}."
            )
        if self.state_bytes > self.blocks_per_state * self.page_bytes:
            raise ConfigError(
                f"a state of {self.state_bytes} bytes does not fit into {self.blocks_per_state} "
                f"pages of {self.page_bytes} bytes."
            )

    @property
    def num_slot_blocks(self) -> int:
        """Blocks that a request holds."""
        return self.num_parts * self.blocks_per_state

    @property
    def page_size_bytes(self) -> int:
        return self.page_bytes

    def max_blocks_per_req(self, max_model_len: int) -> int:
        return self.num_slot_blocks

    def max_held_blocks(self, *, max_model_len: int, max_num_batched_tokens: int) -> int:
        return self.num_slot_blocks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """K and V of encoder tokens. All are known when the request starts; none is added later.

    Args:
        max_encoder_tokens: Largest number of encoder tokens of one request.
    """

    kind: ClassVar[str] = "cross_attention"

    max_encoder_tokens: int

    def max_blocks_per_req(self, max_model_len: int) -> int:
        return cdiv(self.max_encoder_tokens, self.block_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention whose first `sink_len` positions hold learned keys and values.

    These positions belong to the layer, not to a request. Their blocks are allocated once, precede
    the blocks of every request, and are never freed.
    """

    kind: ClassVar[str] = "sink_full_attention"

    sink_len: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    @property
    def num_rows(self) -> int:
        """Rows of the cache arrays that the layers use."""
        spec = self.kv_cache_spec
        num_parts = spec.num_parts if isinstance(spec, MambaSpec) else 1
        return cdiv(len(self.layer_names), num_parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The whole KV cache: one pool of `num_blocks` blocks (block 0 is the null block).

    Layer j of every group uses row j of the cache arrays; for groups of states, see `MambaSpec`. So
    a block of the pool consists of `num_rows` pages, one per row of the largest group.

    Args:
        kv_sharing_targets: Pairs (layer, earlier layer): the layer reads the earlier layer's keys
            and values, and is not in any group.
        hash_block_size: Tokens that one block hash covers. It must divide every group's block
            size. None chooses the greatest common divisor.
    """

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    kv_sharing_targets: tuple[tuple[str, str], ...] = ()
    hash_block_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_blocks >= 2**31:
            raise ConfigError(
                f"num_blocks must be below 2**31, as block ids are i32, got {self.num_blocks}."
            )
        if self.hash_block_size is not None and self.hash_block_size < 1:
            raise ConfigError(f"hash_block_size must be at least 1, got {self.hash_block_size}.")
        for group in self.kv_cache_groups:
            block_size = group.kv_cache_spec.block_size
            # The root of block hashes contains the block size as 32 bits.
            if not 1 <= block_size < 2**32:
                raise ConfigError(f"a group's {block_size=} must be in [1, 2**32).")

    @property
    def num_rows(self) -> int:
        return max(group.num_rows for group in self.kv_cache_groups)

    @property
    def resolved_hash_block_size(self) -> int:
        """`hash_block_size`, or the greatest common divisor of the groups' block sizes."""
        if self.hash_block_size is not None:
            return self.hash_block_size
        return math.gcd(*(group.kv_cache_spec.block_size for group in self.kv_cache_groups))

    @property
    def has_states(self) -> bool:
        return any(isinstance(group.kv_cache_spec, MambaSpec) for group in self.kv_cache_groups)

    @property
    def can_share_prefixes(self) -> bool:
        """Whether requests can find each other's blocks by the hashes of their tokens.

        Not with cross-attention: the decoder's keys and values depend on the encoder's input, which
        block hashes do not cover.
        """
        specs = [group.kv_cache_spec for group in self.kv_cache_groups]
        return not any(isinstance(spec, CrossAttentionSpec) for spec in specs)
