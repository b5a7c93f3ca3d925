"""`DecoderSpec`: the KV caches of a model's layers. The runner plans memory with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.attention_config import AttentionConfig
from models.cache.attention_format import AttentionFormat
from models.cache.format import CacheFormat
from models.errors import ModelConfigError

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
        """Full name -> format of every cache that is not shared from another layer."""
        return {
            layer.full_name(name): cache.format
            for layer in self.layers
            for name, cache in layer.caches
            if cache.owner is None
        }

    @property
    def owners(self) -> dict[str, str]:
        """Full name of every shared cache -> full name of the cache that is read for it."""
        return {
            layer.full_name(name): cache.owner
            for layer in self.layers
            for name, cache in layer.caches
            if cache.owner is not None
        }


def spec_of_attention(
    attention: Sequence[AttentionConfig], *, kv_dtype: str, has_unified_kv: bool = False
) -> DecoderSpec:
    """The spec of layers that each have attention over their own keys and values.

    Args:
        kv_dtype: Of keys and values.
        has_unified_kv: Whether all layers keep all keys and values, also left of their windows.

    Raises:
        ModelConfigError: A layer reads the keys and values of one that is not earlier, has none of
            its own, or has others than the layer needs.
    """
    some_window = next((layer.sliding_window for layer in attention if layer.sliding_window), None)
    some_chunk = next((layer.chunk_size for layer in attention if layer.chunk_size), None)
    formats = [
        _with_all_tokens(cache, some_window, some_chunk) if has_unified_kv else cache
        for cache in (format_of_attention(layer, kv_dtype=kv_dtype) for layer in attention)
    ]
    names = [f"model.layers.{layer_idx}" for layer_idx in range(len(attention))]
    layers = []
    for layer_idx, (layer, cache) in enumerate(zip(attention, formats, strict=True)):
        owner = None
        if layer.kv_layer_idx is not None:
            _check_owner(attention, formats, layer_idx)
            owner = f"{names[layer.kv_layer_idx]}.{SELF_ATTENTION}"
        ref = CacheRef(format=cache, owner=owner)
        layers.append(LayerSpec(name=names[layer_idx], caches=((SELF_ATTENTION, ref),)))
    return DecoderSpec(layers=tuple(layers))


def format_of_attention(layer: AttentionConfig, *, kv_dtype: str) -> AttentionFormat:
    """How the keys and values of a layer lie in pages; the narrower ones of the two are padded."""
    kind = "full"
    if layer.sliding_window is not None:
        kind = "window"
    elif layer.chunk_size is not None:
        kind = "chunk"
    return AttentionFormat(
        num_kv_heads=layer.num_kv_heads,
        head_dim=max(layer.head_dim, layer.value_head_dim),
        content_dim=None if layer.value_head_dim == layer.head_dim else layer.kv_width,
        dtype=kv_dtype,
        kind=kind,
        sliding_window=layer.sliding_window,
        chunk_size=layer.chunk_size,
    )


def _with_all_tokens(
    cache: AttentionFormat, window: int | None, chunk_size: int | None
) -> AttentionFormat:
    return replace(cache, kind="full", sliding_window=window, chunk_size=chunk_size)


def _check_owner(
    attention: Sequence[AttentionConfig], formats: Sequence[AttentionFormat], layer_idx: int
) -> None:
    owner_idx = attention[layer_idx].kv_layer_idx
    is_earlier = 0 <= owner_idx < layer_idx
    if not is_earlier or attention[owner_idx].kv_layer_idx is not None:
        raise ModelConfigError(
            f"config.json: layer {layer_idx} shares the keys and values of layer {owner_idx}; "
            "wanted an earlier layer that has its own."
        )
    if formats[layer_idx] != formats[owner_idx]:
        raise ModelConfigError(
            f"config.json: layer {layer_idx} shares the keys and values of layer {owner_idx}, "
            f"which keeps {formats[owner_idx]}; wanted {formats[layer_idx]}."
        )
