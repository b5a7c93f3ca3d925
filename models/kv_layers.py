"""What each layer of a model needs of the KV cache, and which block table and row serve it."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from models.config import ModelConfig
from models.layer_context import CachePlace

# Up to this ratio of layers of the commonest to the rarest kind, padding beats more groups.
_MAX_PADDED_RATIO = 1.25


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


def group_layers(kinds: Mapping[str, Hashable]) -> tuple[tuple[str, ...], ...]:
    """Splits layers into KV cache groups: each of one kind, none larger than need be.

    A block of the pool holds a page for each row, and a group uses as many rows as it has layers.
    So groups are made equally large: as large as the rarest kind is common.

    Example: 22 sliding and 4 full layers -> groups of at most 4: 6 sliding ones and a full one.

    Args:
        kinds: Layer name -> what its block table depends on, in the order of the layers.

    Returns:
        Layer names per group; kinds in the order of their first layer.

    Source: vLLM `v1/core/kv_cache_utils.py`.
    """
    names_by_kind: dict[Hashable, list[str]] = {}
    for name, kind in kinds.items():
        names_by_kind.setdefault(kind, []).append(name)
    if not names_by_kind:
        return ()
    counts = [len(names) for names in names_by_kind.values()]
    group_size = min(counts)
    if max(counts) < group_size * _MAX_PADDED_RATIO:
        group_size = max(counts)
    groups: list[tuple[str, ...]] = []
    for names in names_by_kind.values():
        num_groups = -(-len(names) // group_size)
        # Every num_groups-th: with stages of layers on different devices, each gets some.
        groups += [tuple(names[start::num_groups]) for start in range(num_groups)]
    return tuple(groups)


def place_layers(layers: tuple[LayerKVSpec, ...]) -> dict[str, CachePlace]:
    """Group and row of each layer; a layer that shares keys and values has its target's."""
    groups = group_layers(
        {
            layer.name: (layer.num_kv_heads, layer.head_dim, layer.sliding_window)
            for layer in layers
            if layer.kv_sharing_target is None
        }
    )
    placements = {
        name: CachePlace(group_idx=group_idx, row=row)
        for group_idx, names in enumerate(groups)
        for row, name in enumerate(names)
    }
    for layer in layers:
        if layer.kv_sharing_target is not None:
            placements[layer.name] = placements[layer.kv_sharing_target]
    return placements


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
