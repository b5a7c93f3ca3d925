"""`DecoderSpec`: the KV caches of a model's layers. The runner plans memory with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from models.cache.format import KV_KINDS, CacheFormat
from models.config.attention_config import SELF_ATTENTION, AttentionConfig
from models.errors import ModelConfigError

# The index of a layer, and the local name of one of its caches.
CacheKey = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRef:
    """A cache that a layer uses: its own, or the cache of an earlier layer.

    Args:
        owner: Full name of the earlier layer's cache, such as "model.layers.3.self_attn". The layer
            reads this cache and writes nothing to it. None: the layer has a cache of its own.
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

    def on_each_of(self, num_devices: int) -> "DecoderSpec":
        """The caches as each device of a mesh keeps them."""

        def split(layer: LayerSpec) -> LayerSpec:
            caches = tuple(
                (name, replace(ref, format=ref.format.on_each_of(num_devices)))
                for name, ref in layer.caches
            )
            return replace(layer, caches=caches)

        return replace(self, layers=tuple(map(split, self.layers)))

    def with_state_dtypes(self, *, window: str | None, state: str | None) -> "DecoderSpec":
        """The caches with windows of convolutions and states in these dtypes.

        None: as the model has them.
        """
        dtypes = {"window_dtype": window, "state_dtype": state}
        dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is not None}

        def change(layer: LayerSpec) -> LayerSpec:
            caches = tuple(
                (
                    name,
                    replace(ref, format=replace(ref.format, **dtypes))
                    if ref.format.kind == "state"
                    else ref,
                )
                for name, ref in layer.caches
            )
            return replace(layer, caches=caches)

        return replace(self, layers=tuple(map(change, self.layers)))

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
        """Full name of every shared cache -> full name of the earlier layer's cache to read."""
        return {
            layer.full_name(name): cache.owner
            for layer in self.layers
            for name, cache in layer.caches
            if cache.owner is not None
        }


def spec_of_attention(
    attention: Sequence[AttentionConfig | None], *, kv_dtype: str, has_unified_kv: bool = False
) -> DecoderSpec:
    """The spec of layers whose only caches are the caches of their attention.

    Args:
        attention: The attention of each layer. None: the layer has no attention.
        kv_dtype: The dtype of keys and values.
        has_unified_kv: Whether every layer keeps the keys and values of all tokens, even of tokens
            outside of its window or chunk.

    Raises:
        ModelConfigError: A layer reads the keys and values of another layer which is not earlier,
            has no keys and values of its own, or stores them in another format.
    """
    formats = {
        (layer_idx, name): cache
        for layer_idx, layer in enumerate(attention)
        if layer is not None
        for name, cache in layer.formats(kv_dtype).items()
    }
    if has_unified_kv:
        formats = _with_all_tokens(formats)
    caches = {layer_idx: {} for layer_idx in range(len(attention))}
    for (layer_idx, name), cache in formats.items():
        owner_idx = attention[layer_idx].kv_layer_idx if name == SELF_ATTENTION else None
        owner = None
        if owner_idx is not None:
            _check_owner(owner_idx, attention, formats, layer_idx)
            owner = f"{_layer_name(owner_idx)}.{SELF_ATTENTION}"
        caches[layer_idx][name] = CacheRef(format=cache, owner=owner)
    return DecoderSpec(
        layers=tuple(
            LayerSpec(name=_layer_name(layer_idx), caches=tuple(of_layer.items()))
            for layer_idx, of_layer in caches.items()
        )
    )


def with_states(spec: DecoderSpec, name: str, cache: CacheFormat) -> DecoderSpec:
    """The spec in which layers without caches have one of states, with this local name."""
    return with_states_in(spec, [not layer.caches for layer in spec.layers], name, cache)


def with_states_in(
    spec: DecoderSpec, has_state: Sequence[bool], name: str, cache: CacheFormat
) -> DecoderSpec:
    """The spec in which some layers also have a cache of states, with this local name.

    Args:
        has_state: For each layer, whether it has one.
    """
    states = ((name, CacheRef(format=cache)),)
    return DecoderSpec(
        layers=tuple(
            replace(layer, caches=layer.caches + states if has else layer.caches)
            for layer, has in zip(spec.layers, has_state, strict=True)
        )
    )


def with_drafter(spec: DecoderSpec, drafter: DecoderSpec) -> DecoderSpec:
    """The spec of a model and its drafter, whose layers follow under names of their own."""

    def rename(name: str) -> str:
        return f"drafter.{name}"

    layers = [
        LayerSpec(
            name=rename(layer.name),
            caches=tuple(
                (name, replace(cache, owner=cache.owner and rename(cache.owner)))
                for name, cache in layer.caches
            ),
        )
        for layer in drafter.layers
    ]
    return DecoderSpec(layers=(*spec.layers, *layers))


def _layer_name(layer_idx: int) -> str:
    return f"model.layers.{layer_idx}"


def _with_all_tokens(formats: Mapping[CacheKey, CacheFormat]) -> dict[CacheKey, CacheFormat]:
    """The formats with keys and values of all tokens. Caches of other kinds keep theirs."""
    of_kv = {key: cache for key, cache in formats.items() if cache.kind in KV_KINDS}
    window = next(filter(None, (cache.sliding_window for cache in of_kv.values())), None)
    chunk = next(filter(None, (cache.chunk_size for cache in of_kv.values())), None)
    unified = {
        key: replace(cache, kind="full", sliding_window=window, chunk_size=chunk)
        for key, cache in of_kv.items()
    }
    return {**formats, **unified}


def _check_owner(
    owner_idx: int,
    attention: Sequence[AttentionConfig | None],
    formats: Mapping[CacheKey, CacheFormat],
    layer_idx: int,
) -> None:
    owner = attention[owner_idx] if 0 <= owner_idx < layer_idx else None
    if owner is None or owner.kv_layer_idx is not None:
        raise ModelConfigError(
            f"config.json: layer {layer_idx} shares the keys and values of layer {owner_idx}; "
            "expected an earlier layer that has its own."
        )
    if formats[layer_idx, SELF_ATTENTION] != formats[owner_idx, SELF_ATTENTION]:
        raise ModelConfigError(
            f"config.json: layer {layer_idx} shares the keys and values of layer {owner_idx}, "
            f"which has {_described(owner)}; expected {_described(attention[layer_idx])}."
        )


def _described(layer: AttentionConfig) -> str:
    return (
        f"{layer.num_kv_heads} KV heads, head_dim={layer.head_dim}, "
        f"v_head_dim={layer.value_head_dim}, sliding_window={layer.sliding_window} and "
        f"chunk_size={layer.chunk_size}"
    )
