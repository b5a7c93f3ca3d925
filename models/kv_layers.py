"""What each layer of a model needs of the KV cache."""

from dataclasses import dataclass

from models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKVSpec:
    """The KV cache needs of one layer, per cached token."""

    name: str  # "model.layers.0.self_attn", as in the checkpoint
    num_kv_heads: int
    head_dim: int


def kv_cache_layers(config: ModelConfig) -> tuple[LayerKVSpec, ...]:
    """Lists the layers that cache keys and values, in order: here every layer, all alike.

    They are one group, so `num_groups` is 1 and layer j uses row j of the cache.
    """
    return tuple(
        LayerKVSpec(
            name=f"model.layers.{layer_idx}.self_attn",
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        for layer_idx in range(config.num_layers)
    )
