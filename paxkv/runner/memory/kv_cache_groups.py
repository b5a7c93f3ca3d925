"""The KV cache groups of a model. Their pages have one size, so all groups share one pool."""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence

from models import AttentionFormat, CacheFormat, CachePlace, DecoderSpec, LayerPlaces
from paxkv.contracts.kv_cache_spec import (
    DTYPE_BYTES,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError, InvariantError
from paxkv.runner.shapes.program_shapes import TableShape

# Padding takes less memory than more groups if the most common kind of layer has fewer layers than
# this factor times the rarest kind.
_MAX_PADDED_RATIO = 1.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroups:
    """The groups of a `KVCacheConfig`, with two more fields but without a number of blocks.

    Args:
        formats: Full name of each cache -> its format, in pages of the common size. Empty if
            the groups were made from specs alone.
        padded_shares: Full name -> share of its pages that is padding, for caches with padding.
    """

    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    kv_sharing_targets: tuple[tuple[str, str], ...] = ()
    formats: Mapping[str, CacheFormat] = dataclasses.field(default_factory=dict)
    padded_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def num_whole_states(self) -> int:
        """Caches of states that a mesh does not split: each device has the states of all heads."""
        states = [cache for cache in self.formats.values() if cache.kind == "state"]
        return sum(not cache.is_part for cache in states)

    def tables(self, max_model_len: int) -> tuple[TableShape, ...]:
        """Returns the block tables of a step. Neighboring groups share an array if they can."""
        return tuple(_table_shape(specs, max_model_len) for specs in self._specs_by_inputs())

    def places(self, spec: DecoderSpec) -> tuple[LayerPlaces, ...]:
        """Returns the places of the caches of each layer. A shared cache has its owner's place.

        Raises:
            InvariantError: A cache is in no group.
        """
        found = self._find_places()
        found |= {name: found[owner] for name, owner in spec.owners.items() if owner in found}
        names = [layer.full_name(name) for layer in spec.layers for name, _ in layer.caches]
        if missing := [name for name in names if name not in found]:
            raise InvariantError(
                f"caches {missing} are in no KV cache group; the groups have {sorted(found)}."
            )
        return tuple(
            tuple((name, found[layer.full_name(name)]) for name, _ in layer.caches)
            for layer in spec.layers
        )

    def config(self, num_blocks: int) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_groups=self.kv_cache_groups,
            kv_sharing_targets=self.kv_sharing_targets,
        )

    def _find_places(self) -> dict[str, CachePlace]:
        found = {}
        groups = iter(self.kv_cache_groups)
        for inputs_idx, specs in enumerate(self._specs_by_inputs()):
            for group_idx, spec in enumerate(specs):
                num_parts = spec.num_parts if isinstance(spec, MambaSpec) else 1
                for layer_idx, name in enumerate(next(groups).layer_names):
                    row, part = divmod(layer_idx, num_parts)
                    found[name] = CachePlace(
                        format=self.formats[name],
                        inputs_idx=inputs_idx,
                        group_idx=group_idx + part,
                        row=row,
                    )
        return found

    def _specs_by_inputs(self) -> list[list[KVCacheSpec]]:
        specs = (group.kv_cache_spec for group in self.kv_cache_groups)
        return [list(run) for _, run in itertools.groupby(specs, key=_inputs_kind)]


def _inputs_kind(spec: KVCacheSpec) -> Hashable:
    """Returns equal values for groups whose block tables can share an array."""
    if isinstance(spec, MambaSpec):
        return spec
    return spec.block_size, isinstance(spec, CrossAttentionSpec)


def _table_shape(specs: Sequence[KVCacheSpec], max_model_len: int) -> TableShape:
    first = specs[0]
    if isinstance(first, MambaSpec):
        return TableShape(
            num_groups=first.num_parts,
            max_blocks_per_req=first.blocks_per_state,
            block_size=first.block_size,
            is_state=True,
        )
    return TableShape(
        num_groups=len(specs),
        max_blocks_per_req=max(spec.max_blocks_per_req(max_model_len) for spec in specs),
        block_size=first.block_size,
    )


def groups_of_spec(
    spec: DecoderSpec, *, block_size: int, head_dim_step: int = 1, num_context_ranks: int = 1
) -> KVCacheGroups:
    """Makes the KV cache groups of a model.

    Args:
        block_size: Tokens in a block of the caches with the largest pages. A block of another cache
            has this number times a power of two.
        head_dim_step: `Platform.head_dim_step`.
        num_context_ranks: Devices that share the positions of a request. A block has `block_size`
            tokens on each.

    Raises:
        ConfigError: No layer caches anything, no page size suits all caches, or a cache could fill
            its pages only with heads whose width is not a multiple of `head_dim_step`.
    """
    own = spec.own_formats
    if not own:
        raise ConfigError("no layer of the model caches anything.")
    agreed = agree_on_pages(
        {name: cache.with_width_step(head_dim_step) for name, cache in own.items()}, block_size
    )
    for name, (cache, _, _) in agreed.items():
        if cache.with_width_step(head_dim_step) != cache:
            raise ConfigError(
                f"cache {name!r} cannot fill the pages of the other caches: it would have to be "
                f"{cache}, and this platform stores heads in multiples of {head_dim_step}. Use "
                "another model."
            )
    groups = make_kv_cache_groups(
        {
            name: _on_ranks(cache_spec(cache, size, page_bytes), num_context_ranks)
            for name, (cache, size, page_bytes) in agreed.items()
        },
        kv_sharing_targets=spec.owners,
    )
    padded_shares = {}
    for name, (_, size, page_bytes) in agreed.items():
        num_pages = own[name].num_pages(page_bytes) if _is_state(own[name]) else 1
        if (share := own[name].content_bytes(size) / (num_pages * page_bytes)) < 1:
            padded_shares[name] = 1 - share
    return dataclasses.replace(
        groups,
        formats={name: cache for name, (cache, _, _) in agreed.items()},
        padded_shares=padded_shares,
    )


def agree_on_pages(
    formats: Mapping[str, CacheFormat], block_size: int
) -> dict[str, tuple[CacheFormat, int, int]]:
    """Gives all caches pages of one size.

    The cache of tokens with the largest pages sets the size. A cache with smaller pages gets blocks
    that are larger by a power of two: the largest for which it can have such pages. If its content
    still does not fill a page, the rest is padding. A state takes as many pages as it needs. If a
    model has only states, the largest of them sets the size.

    Example: pages of 64 KiB, 16 KiB and 24 KiB at block size 16 -> block sizes 16, 64 and 32. A
    quarter of the third cache's pages is padding.

    Returns:
        For each name: the format, the block size, and the bytes of a page.

    Raises:
        ConfigError: A cache cannot have pages of this size.
    """
    own_bytes = {name: cache.page_bytes(block_size) for name, cache in formats.items()}
    of_tokens = [name for name, cache in formats.items() if not _is_state(cache)]
    page_bytes = max((own_bytes[name] for name in of_tokens or formats), default=0)
    sizes = {name: _size_of_blocks(formats[name], block_size, page_bytes) for name in of_tokens}
    # A prefix hit must end at a block boundary in every group. A state for the hit ends there too.
    state_size = math.lcm(block_size, *sizes.values())
    agreed = {}
    for name, cache in formats.items():
        size = sizes.get(name, state_size)
        wide = cache.with_page_bytes(page_bytes, size)
        if wide is None:
            raise ConfigError(
                f"cache {name!r} cannot have the pages of the other caches: got {own_bytes[name]} "
                f"bytes for a block of {block_size} tokens, and pages of {page_bytes} bytes. Set "
                "another kv_cache_dtype, or use another model."
            )
        agreed[name] = (wide, size, page_bytes)
    return agreed


def _size_of_blocks(cache: CacheFormat, block_size: int, page_bytes: int) -> int:
    """The largest block size for which a cache of tokens has pages of these bytes.

    `block_size` if there is none.
    """
    num_fitting = page_bytes // cache.page_bytes(block_size)
    sizes = [block_size << shift for shift in reversed(range(num_fitting.bit_length()))]
    fitting = (size for size in sizes if cache.with_page_bytes(page_bytes, size) is not None)
    return next(fitting, block_size)


def _is_state(cache: CacheFormat) -> bool:
    return cache.kind == "state"


def cache_spec(cache: CacheFormat, block_size: int, page_bytes: int) -> KVCacheSpec:
    """Describes a cache to the block pool and the scheduler: its kind, and the bytes of its pages.

    Raises:
        ConfigError: Caches of this kind are not supported yet.
    """
    if cache.kind in ("full", "window", "chunk"):
        return _attention_spec(cache, block_size)
    own_bytes = cache.page_bytes(block_size)
    padded_bytes = None if own_bytes == page_bytes else page_bytes
    if cache.kind in ("latent", "index"):
        # One vector per token.
        return MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=own_bytes // (block_size * DTYPE_BYTES[cache.dtype]),
            dtype=cache.dtype,
            page_size_padded=padded_bytes,
        )
    if _is_state(cache):
        return MambaSpec(
            block_size=block_size,
            page_bytes=page_bytes,
            state_bytes=cache.content_bytes(block_size),
            blocks_per_state=cache.num_pages(page_bytes),
        )
    raise ConfigError(f"caches of the kind {cache.kind!r} are not supported yet: got {cache}.")


def _on_ranks(spec: KVCacheSpec, num_ranks: int) -> KVCacheSpec:
    """The spec of blocks that have `spec.block_size` tokens on each of `num_ranks` devices.

    Raises:
        ConfigError: Devices cannot share the positions of such a cache.
    """
    if num_ranks == 1:
        return spec
    if not isinstance(spec, FullAttentionSpec):
        raise ConfigError(
            f"devices cannot share the positions of a cache of the kind {spec.kind!r} yet. Leave "
            "decode_context_parallel_size out."
        )
    block_size = spec.block_size * num_ranks
    return dataclasses.replace(spec, block_size=block_size, num_ranks=num_ranks)


def _attention_spec(cache: AttentionFormat, block_size: int) -> AttentionSpec:
    fields = {
        "block_size": block_size,
        "num_kv_heads": cache.num_kv_heads,
        "head_size": cache.head_dim,
        "dtype": cache.dtype,
    }
    window, chunk_size = cache.sliding_window, cache.chunk_size
    if cache.kind == "window":
        return SlidingWindowSpec(**fields, sliding_window=window)
    if cache.kind == "chunk":
        return ChunkedLocalAttentionSpec(**fields, attention_chunk_size=chunk_size)
    return FullAttentionSpec(**fields, sliding_window=window, attention_chunk_size=chunk_size)


def group_layers(kinds: Mapping[str, Hashable]) -> tuple[tuple[str, ...], ...]:
    """Splits layers into KV cache groups. All layers of a group have the same kind.

    A block of the pool has a page for each row, and a group uses one row per layer. Rows that a
    group does not use are padding, so all groups get about as many layers as the rarest kind has.

    Example: 22 sliding and 4 full layers -> groups of at most 4: 6 sliding groups and a full one.

    Args:
        kinds: Layer name -> its kind, in the order of the layers. Layers of one kind can share a
            block table.

    Returns:
        Layer names of each group. Kinds are in the order of their first layers.

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
        # A group takes every num_groups-th layer. If devices compute different stages of layers,
        # each stage has layers of each group.
        groups += [tuple(names[start::num_groups]) for start in range(num_groups)]
    return tuple(groups)


def make_kv_cache_groups(
    specs: Mapping[str, KVCacheSpec], *, kv_sharing_targets: Mapping[str, str] | None = None
) -> KVCacheGroups:
    """Groups caches of equal specs.

    Args:
        specs: Name of a cache -> its spec, in the order of the layers. All pages have the same size
            (`agree_on_pages`).
        kv_sharing_targets: Name of a shared cache -> name of the earlier cache whose pages it uses.
            Shared caches are in no group and not in `specs`.

    Raises:
        InvariantError: A shared cache uses pages of a cache that is not in `specs`, or pages differ
            in size.
    """
    targets = kv_sharing_targets or {}
    for name, target in targets.items():
        if target not in specs or name in specs:
            raise InvariantError(
                f"cache {name!r} must share a cache that has pages of its own: got {target!r}, "
                f"expected one of {sorted(specs)}."
            )
    sizes = {spec.page_size_bytes for spec in specs.values()}
    if len(sizes) != 1:
        raise InvariantError(f"pages must have one size, got {sorted(sizes)} bytes.")
    groups = [
        group
        for spec, layers in itertools.groupby(group_layers(specs), lambda names: specs[names[0]])
        for group in _groups_of_kind(spec, list(layers))
    ]
    # Groups become neighbors if their block tables can share an array. Otherwise the order stays.
    first_idx = {}
    for group_idx, group in enumerate(groups):
        first_idx.setdefault(_inputs_kind(group.kv_cache_spec), group_idx)
    groups.sort(key=lambda group: first_idx[_inputs_kind(group.kv_cache_spec)])
    return KVCacheGroups(
        kv_cache_groups=tuple(groups),
        kv_sharing_targets=tuple(targets.items()),
    )


def _groups_of_kind(spec: KVCacheSpec, layers: Sequence[tuple[str, ...]]) -> list[KVCacheGroupSpec]:
    """Makes the groups of one kind. States get one group, whose slots have `len(layers)` parts.

    Args:
        layers: Results of `group_layers`: group i has every n-th layer, from layer i on.
    """
    if isinstance(spec, MambaSpec):
        in_order = [name for names in itertools.zip_longest(*layers) for name in names if name]
        spec = dataclasses.replace(spec, num_parts=len(layers))
        return [KVCacheGroupSpec(layer_names=tuple(in_order), kv_cache_spec=spec)]
    return [KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec) for names in layers]
