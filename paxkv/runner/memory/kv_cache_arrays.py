"""The KV cache's device arrays: their dtype, their sharding, and their allocation."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from models import KVCache, Platform
from models.weight_rule import MODEL_AXIS
from paxkv.contracts.kv_cache_spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError


def kv_cache_dtype(model_dtype: str, platform: Platform, wanted: str = "auto") -> str:
    """The dtype that keys and values are stored in.

    Args:
        wanted: `CacheConfig.kv_cache_dtype`.

    Raises:
        ConfigError: The platform cannot keep them in what is wanted.
    """
    allowed = platform.kv_cache_dtypes(model_dtype)
    if wanted == "auto":
        return allowed[0]
    if wanted not in allowed:
        raise ConfigError(
            f"kv_cache_dtype is {wanted!r}; on {platform.name} a model in {model_dtype} keeps keys "
            f"and values in {' or '.join(allowed)}. Choose one of them, or auto."
        )
    return wanted


def device_mesh(device: jax.Device) -> Mesh:
    """A mesh of one device, whose axis is the one that heads would be split over."""
    return Mesh(np.array([device]), (MODEL_AXIS,), axis_types=(AxisType.Auto,))


def kv_cache_sharding(mesh: Mesh) -> NamedSharding:
    """KV heads over `MODEL_AXIS`; the other axes of the cache whole."""
    return NamedSharding(mesh, PartitionSpec(None, None, MODEL_AXIS, None, None))


def page_spec(groups: Sequence[KVCacheGroupSpec]) -> AttentionSpec:
    """The one page format of all groups.

    Raises:
        ConfigError: They differ, or have one that these arrays cannot hold.
    """
    for group in groups:
        spec = group.kv_cache_spec
        # Exactly these: of the kinds derived from them, some have no V and some another layout.
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec) or spec.page_size_padded:
            raise ConfigError(
                f"layers {list(group.layer_names)} cache in a format that cannot be computed with "
                f"yet: got {spec}, wanted full or sliding-window attention without padding. "
                "Use another model."
            )
    # TODO: drop when the cache is raw storage, cast to a layer's own format after the gather.
    if len({_page_format(group.kv_cache_spec) for group in groups}) > 1:
        formats = [(list(g.layer_names), _page_format(g.kv_cache_spec)) for g in groups]
        raise ConfigError(
            "all layers must cache in one format (block_size, num_kv_heads, head_size, "
            f"head_size_v, dtype) to be computed with, got {formats}. Use another model."
        )
    return groups[0].kv_cache_spec


def abstract_kv_cache(config: KVCacheConfig, mesh: Mesh) -> KVCache:
    """Shapes, dtypes and shardings of the cache, for compiling without memory for it.

    Raises:
        ConfigError: The cache has more slots than an int32 can count, or groups' pages differ.
    """
    spec = page_spec(config.kv_cache_groups)
    try:
        pallas_kernels.pad_slot(config.num_rows, config.num_blocks, spec.block_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return _map_arrays(
        config, functools.partial(jax.ShapeDtypeStruct, sharding=kv_cache_sharding(mesh))
    )


def empty_kv_cache(config: KVCacheConfig) -> KVCache:
    """A cache of zeros inside a program, on one device. Raises as `page_spec`."""
    return _map_arrays(config, jnp.zeros)


def _map_arrays(
    config: KVCacheConfig, make: Callable[[tuple[int, ...], jnp.dtype], object]
) -> KVCache:
    """`make(shape, dtype)` for each array of the cache."""
    spec = page_spec(config.kv_cache_groups)
    shape = (config.num_rows, config.num_blocks, spec.num_kv_heads, spec.block_size)
    dtype = jnp.dtype(spec.dtype)
    return KVCache(
        k=make((*shape, spec.head_size), dtype), v=make((*shape, _head_size_v(spec)), dtype)
    )


def allocate_kv_cache(config: KVCacheConfig, mesh: Mesh) -> KVCache:
    """The cache, all zeros.

    Raises:
        ConfigError: There is no memory for it, or as `abstract_kv_cache` does.
    """
    arrays = abstract_kv_cache(config, mesh)
    try:
        return jax.tree.map(
            lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding), arrays
        )
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        reason = str(error).rstrip(".")
        num_mib = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays)) >> 20
        raise ConfigError(
            f"there is no memory for a KV cache of {num_mib:,} MiB ({config.num_blocks} blocks): "
            f"{reason}. Set a smaller cpu_kv_cache_bytes on the CPU, elsewhere a smaller "
            "gpu_memory_utilization; or num_gpu_blocks_override."
        ) from error


def _page_format(spec: AttentionSpec) -> tuple[int | str, ...]:
    return (spec.block_size, spec.num_kv_heads, spec.head_size, _head_size_v(spec), spec.dtype)


def _head_size_v(spec: AttentionSpec) -> int:
    return spec.head_size if spec.head_size_v is None else spec.head_size_v
