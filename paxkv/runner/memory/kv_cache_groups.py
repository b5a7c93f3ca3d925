"""How a model's layers form KV cache groups whose pages agree, so that one pool serves them all."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from models import CachePlace, LayerKVSpec
from paxkv.contracts.kv_cache_spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)
from paxkv.errors import ConfigError, InvariantError

# Up to this ratio of layers of the commonest to the rarest kind, padding beats more groups.
_MAX_PADDED_RATIO = 1.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroups:
    """A KV cache but for the number of its blocks; fields as in `KVCacheConfig`."""

    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    kv_sharing_targets: tuple[tuple[str, str], ...] = ()

    def places(self, layers: Sequence[LayerKVSpec]) -> tuple[CachePlace, ...]:
        """Where each layer finds its keys and values; one that shares them, where its target does.

        Raises:
            InvariantError: A layer is in no group.
        """
        found = {
            name: CachePlace(group_idx=group_idx, row=row)
            for group_idx, group in enumerate(self.kv_cache_groups)
            for row, name in enumerate(group.layer_names)
        }
        owners = [layer.kv_sharing_target or layer.name for layer in layers]
        if missing := [name for name in owners if name not in found]:
            raise InvariantError(
                f"layers {missing} are in no KV cache group; the groups have {sorted(found)}."
            )
        return tuple(found[name] for name in owners)

    def config(self, num_blocks: int) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_groups=self.kv_cache_groups,
            kv_sharing_targets=self.kv_sharing_targets,
        )


def attention_spec(layer: LayerKVSpec, *, block_size: int, dtype: str) -> AttentionSpec:
    """The KV format of a model's layer."""
    if layer.sliding_window is None:
        return FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_dim,
            dtype=dtype,
            sliding_window=layer.unified_window,
        )
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_dim,
        dtype=dtype,
        sliding_window=layer.sliding_window,
    )


def groups_of_layers(
    layers: tuple[LayerKVSpec, ...], *, block_size: int, dtype: str
) -> KVCacheGroups:
    """The groups of a model's layers. Raises as `make_kv_cache_groups`."""
    return make_kv_cache_groups(
        {
            layer.name: attention_spec(layer, block_size=block_size, dtype=dtype)
            for layer in layers
            if layer.kv_sharing_target is None
        },
        kv_sharing_targets={
            layer.name: layer.kv_sharing_target
            for layer in layers
            if layer.kv_sharing_target is not None
        },
    )


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


def make_kv_cache_groups(
    specs: Mapping[str, KVCacheSpec | None], *, kv_sharing_targets: Mapping[str, str] | None = None
) -> KVCacheGroups:
    """Groups layers of equal specs, all groups with pages of the same bytes.

    Args:
        specs: Layer name -> its format, in the order of the layers; None where it caches nothing,
            as in an encoder.
        kv_sharing_targets: Layer name -> earlier layer whose keys and values it reads. It stands
            in no group, and not in `specs`.

    Raises:
        ConfigError: No layer caches anything, or no block sizes make the pages agree.
        InvariantError: A layer shares with one that has no keys and values of its own.
    """
    cached = {name: spec for name, spec in specs.items() if spec is not None}
    if not cached:
        raise ConfigError(f"no layer of the model caches anything, got {sorted(specs)}.")
    targets = kv_sharing_targets or {}
    for name, target in targets.items():
        if target not in cached or name in specs:
            raise InvariantError(
                f"layer {name!r} must share the keys and values of a layer that has its own, "
                f"got {target!r}, wanted one of {sorted(cached)}."
            )
    unified = unify_page_sizes(cached)
    return KVCacheGroups(
        kv_cache_groups=tuple(
            KVCacheGroupSpec(layer_names=names, kv_cache_spec=unified[names[0]])
            for names in group_layers(unified)
        ),
        kv_sharing_targets=tuple(targets.items()),
    )


def unify_page_sizes(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The same layers with pages of the same bytes.

    Attention layers with smaller pages get larger blocks, by a whole factor. A state has the size
    it has: blocks of attention grow until the largest state fits a page, and states are padded.

    Example: pages of 64 KiB and of 16 KiB at block size 16 -> block sizes 16 and 64. Beside a
    state of 100 KiB: 32 and 128, and the state is padded to 128 KiB.

    Raises:
        ConfigError: The largest page of attention is no multiple of another.
    """
    attention_bytes = {
        name: spec.page_size_bytes
        for name, spec in specs.items()
        if not isinstance(spec, MambaSpec)
    }
    state_bytes = max(
        (spec.page_size_bytes for spec in specs.values() if isinstance(spec, MambaSpec)), default=0
    )
    largest = max(attention_bytes.values(), default=state_bytes)
    odd_ones = [name for name, num_bytes in attention_bytes.items() if largest % num_bytes]
    if odd_ones:
        raise ConfigError(
            f"layers {odd_ones} cannot share memory with "
            f"{[name for name, num_bytes in attention_bytes.items() if num_bytes == largest]}: got "
            f"pages of {sorted({attention_bytes[name] for name in odd_ones})} bytes, wanted "
            f"divisors of {largest}. Set another KV cache dtype, or use another model."
        )
    page_bytes = largest * max(cdiv(state_bytes, largest), 1)
    return {name: _with_page_bytes(spec, page_bytes) for name, spec in specs.items()}


def _with_page_bytes(spec: KVCacheSpec, page_bytes: int) -> KVCacheSpec:
    if spec.page_size_bytes == page_bytes:
        return spec
    if isinstance(spec, MambaSpec):
        return dataclasses.replace(spec, page_size_padded=page_bytes)
    block_size = spec.block_size * (page_bytes // spec.page_size_bytes)
    if isinstance(spec, AttentionSpec) and spec.page_size_padded is not None:
        return dataclasses.replace(spec, block_size=block_size, page_size_padded=page_bytes)
    return dataclasses.replace(spec, block_size=block_size)
