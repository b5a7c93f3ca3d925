"""What each layer of a model needs of the KV cache."""

from dataclasses import dataclass

from models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKVSpec:
    """The KV cache needs of one layer, per cached token.

    Args:
        sliding_window: What leaves the window of so many tokens may be forgotten; None keeps all.
        unified_window: Window of some of the model's layers, whose keys and values are all kept.
        kv_sharing_target: Earlier layer whose keys and values this one reads; it writes none.
    """

    name: str  # "model.layers.0.self_attn", as in the checkpoint
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    unified_window: int | None = None
    kv_sharing_target: str | None = None


def kv_cache_layers(config: ModelConfig) -> tuple[LayerKVSpec, ...]:
    """Lists the layers that cache keys and values, in order."""
    windows = [layer.sliding_window for layer in config.attention]
    some_window = next(filter(None, windows), None)
    return tuple(
        LayerKVSpec(
            name=f"model.layers.{layer_idx}.self_attn",
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            sliding_window=None if config.has_unified_kv else layer.sliding_window,
            unified_window=some_window if config.has_unified_kv else None,
        )
        for layer_idx, layer in enumerate(config.attention)
    )
