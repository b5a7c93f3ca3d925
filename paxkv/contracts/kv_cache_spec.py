"""KV cache formats: what one layer stores per block, and how layers form groups."""

import dataclasses

from paxkv.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Format of one layer's KV memory; a block holds `block_size` token positions."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError(f"{type(self).__name__} must say its page size")

    def max_blocks_per_req(self, max_model_len: int) -> int:
        """Most blocks that one request of `max_model_len` tokens can hold."""
        return -(-max_model_len // self.block_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """K and V of `num_kv_heads` heads, `head_size` wide, stored as `dtype`."""

    num_kv_heads: int
    head_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"KV cache dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}."
            )

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to every earlier one, so a request keeps all its blocks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The whole KV cache: one pool of `num_blocks` blocks (block 0 is the null block).

    Layer j of every group lives in row j of the cache arrays, so a block of the pool is
    `num_rows` pages: one per layer of the largest group.
    """

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    @property
    def num_rows(self) -> int:
        return max(len(group.layer_names) for group in self.kv_cache_groups)
