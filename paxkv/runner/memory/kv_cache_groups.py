"""How a model's layers form KV cache groups whose pages agree, so that one pool serves them all."""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping

from models import AttentionFormat, CacheFormat, CachePlace, DecoderSpec, LayerPlaces
from paxkv.contracts.kv_cache_spec import (
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
    cdiv,
)
from paxkv.errors import ConfigError, InvariantError
from paxkv.runner.shapes.program_shapes import TableShape

# Up to this ratio of layers of the commonest to the rarest kind, padding beats more groups.
_MAX_PADDED_RATIO = 1.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroups:
    """The plan of a KV cache, without its number of blocks; fields as in `KVCacheConfig`.

    Args:
        formats: Full name -> format of each cache, in pages that agree. Empty if nothing is
            computed, as in the replay of a trace.
        padded_shares: Full name -> the share of each page that is padding, of caches with any.
    """

    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    kv_sharing_targets: tuple[tuple[str, str], ...] = ()
    formats: Mapping[str, CacheFormat] = dataclasses.field(default_factory=dict)
    padded_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def tables(self, max_model_len: int) -> tuple[TableShape, ...]:
        """The block tables of a step: groups next to each other share an array if they can."""
        return tuple(
            TableShape(
                num_groups=len(specs),
                max_blocks_per_req=max(spec.max_blocks_per_req(max_model_len) for spec in specs),
                block_size=specs[0].block_size,
            )
            for specs in self._specs_by_inputs()
        )

    def places(self, spec: DecoderSpec) -> tuple[LayerPlaces, ...]:
        """Where each layer finds its caches; one that it shares, where its owner does.

        Raises:
            InvariantError: A cache is in no group.
        """
        found = self._find_places()
        owners = spec.owners
        names = [layer.full_name(name) for layer in spec.layers for name, _ in layer.caches]
        if missing := [name for name in names if owners.get(name, name) not in found]:
            raise InvariantError(
                f"caches {missing} are in no KV cache group; the groups have {sorted(found)}."
            )
        return tuple(
            tuple(
                (name, found[owners.get(layer.full_name(name), layer.full_name(name))])
                for name, _ in layer.caches
            )
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
            for group_idx, _ in enumerate(specs):
                for row, name in enumerate(next(groups).layer_names):
                    found[name] = CachePlace(
                        format=self.formats[name],
                        inputs_idx=inputs_idx,
                        group_idx=group_idx,
                        row=row,
                    )
        return found

    def _specs_by_inputs(self) -> list[list[KVCacheSpec]]:
        specs = (group.kv_cache_spec for group in self.kv_cache_groups)
        return [list(run) for _, run in itertools.groupby(specs, key=_inputs_kind)]


def _inputs_kind(spec: KVCacheSpec) -> Hashable:
    """Equal for groups whose block tables can share an array: block sizes and meaning are equal."""
    own_meaning = type(spec) if isinstance(spec, (MambaSpec, CrossAttentionSpec)) else None
    return spec.block_size, own_meaning


def groups_of_spec(spec: DecoderSpec, *, block_size: int, head_dim_step: int = 1) -> KVCacheGroups:
    """The groups of a model's caches.

    Args:
        block_size: Of the caches with the largest pages; others have it times a power of two.
        head_dim_step: `Platform.head_dim_step`.

    Raises:
        ConfigError: As `make_kv_cache_groups`; or no pages of one size hold all caches; or
            the heads that fill such pages are not a multiple of `head_dim_step` wide.
    """
    own = spec.own_formats
    agreed = agree_on_pages(
        {name: _on_platform(cache, head_dim_step) for name, cache in own.items()}, block_size
    )
    for name, (cache, _, _) in agreed.items():
        if _on_platform(cache, head_dim_step) != cache:
            raise ConfigError(
                f"cache {name!r} would need heads of {cache.head_dim} numbers to fill the pages of "
                f"the others; got {own[name].head_dim}, and this platform stores heads in "
                f"multiples of {head_dim_step}. Use another model."
            )
    groups = make_kv_cache_groups(
        {
            name: cache_spec(cache, size, page_bytes)
            for name, (cache, size, page_bytes) in agreed.items()
        },
        kv_sharing_targets=spec.owners,
    )
    padded_shares = {}
    for name, (_, size, page_bytes) in agreed.items():
        if num_unused := page_bytes - own[name].content_bytes(size):
            padded_shares[name] = num_unused / page_bytes
    return dataclasses.replace(
        groups,
        formats={name: cache for name, (cache, _, _) in agreed.items()},
        padded_shares=padded_shares,
    )


def _on_platform(cache: CacheFormat, head_dim_step: int) -> CacheFormat:
    return cache.with_width_step(head_dim_step) if isinstance(cache, AttentionFormat) else cache


def agree_on_pages(
    formats: Mapping[str, CacheFormat], block_size: int
) -> dict[str, tuple[CacheFormat, int, int]]:
    """Gives all caches pages of one size: name -> format, block size and bytes of a page.

    The largest page sets the size. A cache with a smaller page gets a block size that is larger by
    a power of two. If its content still does not fill the page, the rest is padding.

    Example: pages of 64 KiB, 16 KiB and 24 KiB at block size 16 -> block sizes 16, 64 and 32; a
    quarter of the last one's pages is padding.

    Raises:
        ConfigError: A cache cannot lie in such pages.
    """
    own_bytes = {name: cache.page_bytes(block_size) for name, cache in formats.items()}
    largest = max((own_bytes[name] for name in formats if formats[name].kind != "state"), default=0)
    page_bytes = largest or max(own_bytes.values(), default=0)
    agreed = {}
    for name, cache in formats.items():
        if own_bytes[name] > page_bytes:
            raise ConfigError(
                f"cache {name!r} keeps a state of {own_bytes[name]} bytes; wanted at most the "
                f"{page_bytes} of a page: states that take several blocks are not supported yet. "
                "Set a larger block_size."
            )
        num_fitting = 1 if cache.kind == "state" else page_bytes // own_bytes[name]
        size = block_size << (num_fitting.bit_length() - 1)
        wide = cache.with_page_bytes(page_bytes, size)
        if wide is None:
            raise ConfigError(
                f"cache {name!r} cannot lie in the pages of the others: got {own_bytes[name]} "
                f"bytes for a block of {block_size} tokens, and pages of {page_bytes}. Set another "
                "KV cache dtype, or use another model."
            )
        agreed[name] = (wide, size, page_bytes)
    return agreed


def cache_spec(cache: CacheFormat, block_size: int, page_bytes: int) -> KVCacheSpec:
    """What the block pool and the scheduler know of a format: its kind and the bytes of its pages.

    Raises:
        ConfigError: A cache of this kind cannot be planned yet.
    """
    if isinstance(cache, AttentionFormat):
        fields = {
            "block_size": block_size,
            "num_kv_heads": cache.num_kv_heads,
            "head_size": cache.head_dim,
            "dtype": cache.dtype,
        }
        if cache.kind == "window":
            return SlidingWindowSpec(**fields, sliding_window=cache.sliding_window)
        if cache.kind == "chunk":
            return ChunkedLocalAttentionSpec(**fields, attention_chunk_size=cache.chunk_size)
        return FullAttentionSpec(
            **fields, sliding_window=cache.sliding_window, attention_chunk_size=cache.chunk_size
        )
    own_bytes = cache.page_bytes(block_size)
    padded_bytes = None if own_bytes == page_bytes else page_bytes
    if cache.kind in ("latent", "index"):
        # A vector a token, counted in bytes.
        return MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=own_bytes // block_size,
            dtype="int8",
            page_size_padded=padded_bytes,
        )
    if cache.kind == "state":
        return MambaSpec(
            block_size=block_size,
            shapes=((own_bytes,),),
            dtypes=("int8",),
            page_size_padded=padded_bytes,
        )
    raise ConfigError(f"a cache of the kind {cache.kind!r} cannot be planned yet: got {cache}.")


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
    groups = [
        KVCacheGroupSpec(layer_names=names, kv_cache_spec=unified[names[0]])
        for names in group_layers(unified)
    ]
    # Groups whose block tables may share an array, next to each other; else in their own order.
    first_idx = {}
    for group_idx, group in enumerate(groups):
        first_idx.setdefault(_inputs_kind(group.kv_cache_spec), group_idx)
    groups.sort(key=lambda group: first_idx[_inputs_kind(group.kv_cache_spec)])
    return KVCacheGroups(
        kv_cache_groups=tuple(groups),
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
