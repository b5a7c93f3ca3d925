"""`AttentionConfig`: what one layer of attention over keys and values is, as plain numbers."""

from dataclasses import dataclass, replace
from typing import Self

from models.cache.attention_format import AttentionFormat
from models.cache.format import CacheFormat
from models.config.rope_config import RopeConfig, rope_for_length
from models.errors import ModelConfigError

# The name of a layer's cache of keys and values. The attention's weights have the same name.
SELF_ATTENTION = "self_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention of one layer. Layers of one model may differ in any field."""

    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # factor of the products of queries and keys
    v_head_dim: int | None = None  # width of a value; None is `head_dim`
    # Leading dimensions of each head that are turned; None is all of them.
    rotary_dim: int | None = None
    # Whether queries and keys are turned. Otherwise the layer does not see positions.
    has_positions: bool = True
    # A token sees itself and the `sliding_window - 1` tokens before it; None is all of them.
    sliding_window: int | None = None
    # A token at position p sees the positions of its chunk up to its own, from `p // chunk_size *
    # chunk_size` on; None is all. At most one of window and chunk is set.
    chunk_size: int | None = None
    # The earlier layer whose keys and values this one reads; None: it has its own.
    kv_layer_idx: int | None = None
    soft_cap: float | None = None  # bound of the scaled products: cap * tanh(product / cap)
    qkv_bias: bool = False
    out_bias: bool = False
    has_sinks: bool = False  # one more logit per query head in the softmax, with no value
    # ALiBi: each query head's factor of the distance that is added to its logits; None: no bias.
    alibi_slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"config.json: num_attention_heads={self.num_q_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}; every KV head must serve the same "
                "number of query heads."
            )
        if self.head_dim % 2:
            raise ModelConfigError(
                f"config.json: head_dim={self.head_dim} is odd; expected an even number, because "
                "rotary embeddings rotate pairs of dimensions."
            )
        num_turned = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if num_turned % 2 or not 0 < num_turned <= self.head_dim:
            raise ModelConfigError(
                f"config.json: partial_rotary_factor makes rotary embeddings rotate {num_turned} "
                f"of {self.head_dim} dimensions of a head; expected an even number from 2 to "
                f"{self.head_dim}."
            )
        if self.rope.kind == "longrope":
            numbers = len(self.rope.short_factors), len(self.rope.long_factors)
            if numbers != (num_turned // 2, num_turned // 2):
                raise ModelConfigError(
                    f"config.json: longrope has {numbers[0]} short and {numbers[1]} long factors; "
                    f"expected {num_turned // 2} of each, one for each pair of rotated dimensions."
                )
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_q_heads:
            raise ModelConfigError(
                f"a layer has {len(self.alibi_slopes)} ALiBi slopes; expected one for each of its "
                f"{self.num_q_heads} query heads."
            )
        if self.sliding_window is not None and self.chunk_size is not None:
            raise ModelConfigError(
                f"config.json: a layer has sliding_window={self.sliding_window} and "
                f"attention_chunk_size={self.chunk_size}; expected at most one of them."
            )

    def on_each_of(self, num_devices: int) -> "AttentionConfig":
        """The config with the heads and slopes of the first device of a mesh."""
        num_q_heads = self.num_q_heads // num_devices
        return replace(
            self,
            num_q_heads=num_q_heads,
            num_kv_heads=max(1, self.num_kv_heads // num_devices),
            alibi_slopes=self.alibi_slopes and self.alibi_slopes[:num_q_heads],
        )

    @property
    def value_head_dim(self) -> int:
        """Width of a value."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def kv_width(self) -> int:
        """Width of a key and a value together."""
        return self.head_dim + self.value_head_dim

    @property
    def rotary(self) -> tuple[RopeConfig, int]:
        """The embedding, and how many dimensions of each head it turns: 0 without positions.

        Layers with equal values turn by the same angles.
        """
        if not self.has_positions:
            return self.rope, 0
        return self.rope, self.head_dim if self.rotary_dim is None else self.rotary_dim

    def for_length(self, max_model_len: int) -> Self:
        """The attention of an engine whose requests have at most `max_model_len` tokens."""
        return replace(self, rope=rope_for_length(self.rope, max_model_len))

    def formats(self, kv_dtype: str) -> dict[str, CacheFormat]:
        """Local name -> format of every cache that the layer uses.

        If `kv_layer_idx` is set, the cache `SELF_ATTENTION` belongs to the earlier layer.
        """
        return {SELF_ATTENTION: self.format(kv_dtype)}

    def format(self, kv_dtype: str) -> CacheFormat:
        """What the cache `SELF_ATTENTION` holds. The narrower of keys and values are padded.

        Args:
            kv_dtype: The dtype of keys and values.
        """
        kind = "full"
        if self.sliding_window is not None:
            kind = "window"
        elif self.chunk_size is not None:
            kind = "chunk"
        return AttentionFormat(
            num_kv_heads=self.num_kv_heads,
            head_dim=max(self.head_dim, self.value_head_dim),
            content_dim=None if self.value_head_dim == self.head_dim else self.kv_width,
            dtype=kv_dtype,
            kind=kind,
            sliding_window=self.sliding_window,
            chunk_size=self.chunk_size,
        )
