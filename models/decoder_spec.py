"""`DecoderSpec`: what a model's layers keep in the KV cache, for whoever plans its memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.attention_config import AttentionConfig
from models.cache.attention_format import AttentionFormat
from models.cache.format import CacheFormat

# The name of a layer's cache of keys and values, where it has one: that of the attention's weights.
SELF_ATTENTION = "self_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRef:
    """A cache of a layer: its own, or that of an earlier layer.

    Args:
        owner: Full name of the cache that the layer reads instead of having one:
            "model.layers.3.self_attn". The layer writes nothing to it.
    """

    format: CacheFormat
    owner: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The caches of one layer by their local names; their full names are `<layer>.<cache>`."""

    name: str  # "model.layers.3"
    caches: tuple[tuple[str, CacheRef], ...] = ()

    def full_name(self, cache: str) -> str:
        return f"{self.name}.{cache}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The layers of a model, in order. Frozen and hashable."""

    layers: tuple[LayerSpec, ...]

    @property
    def own_formats(self) -> dict[str, CacheFormat]:
        """Full name -> format of every cache that is no other's."""
        return {
            layer.full_name(name): cache.format
            for layer in self.layers
            for name, cache in layer.caches
            if cache.owner is None
        }

    @property
    def owners(self) -> dict[str, str]:
        """Full name -> that of the cache which is read in its place."""
        return {
            layer.full_name(name): cache.owner
            for layer in self.layers
            for name, cache in layer.caches
            if cache.owner is not None
        }


def spec_of_attention(
    attention: Sequence[AttentionConfig], *, kv_dtype: str, has_unified_kv: bool = False
) -> DecoderSpec:
    """Of layers that have attention over their own keys and values, or over another layer's.

    Args:
        kv_dtype: Of keys and values.
        has_unified_kv: All layers keep all keys and values.
    """
    some_window = next((layer.sliding_window for layer in attention if layer.sliding_window), None)
    layers = []
    for layer_idx, layer in enumerate(attention):
        kind = "full" if layer.sliding_window is None or has_unified_kv else "window"
        cache = AttentionFormat(
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=kv_dtype,
            kind=kind,
            sliding_window=some_window if has_unified_kv else layer.sliding_window,
        )
        name = f"model.layers.{layer_idx}"
        layers.append(LayerSpec(name=name, caches=((SELF_ATTENTION, CacheRef(format=cache)),)))
    return DecoderSpec(layers=tuple(layers))
