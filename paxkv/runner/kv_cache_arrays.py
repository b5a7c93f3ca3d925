"""The KV cache's device arrays: their dtype, their sharding, and their allocation."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from models import KVCache
from models.param_sharding import MODEL_AXIS
from paxkv.contracts.kv_cache_spec import AttentionSpec, KVCacheConfig
from paxkv.errors import ConfigError, InvariantError


def kv_cache_dtype(model_dtype: str, platform: str) -> str:
    """The dtype that keys and values are stored in.

    float32 on the CPU, whatever the model's: XLA there rewrites a 16-bit scatter through float32
    and copies the whole cache for it, seconds a step for 1 GiB.
    """
    return "float32" if platform == "cpu" else model_dtype


def device_mesh(device: jax.Device) -> Mesh:
    """A mesh of one device, whose axis is the one that heads would be split over."""
    return Mesh(np.array([device]), (MODEL_AXIS,), axis_types=(AxisType.Auto,))


def kv_cache_sharding(mesh: Mesh) -> NamedSharding:
    """KV heads over `MODEL_AXIS`; the other axes of the cache whole."""
    return NamedSharding(mesh, PartitionSpec(None, None, MODEL_AXIS, None, None))


def abstract_kv_cache(config: KVCacheConfig, mesh: Mesh) -> KVCache:
    """Shapes, dtypes and shardings of the cache, for compiling without memory for it.

    Raises:
        ConfigError: The cache has more slots than an int32 can count.
        InvariantError: The groups' layers do not have pages of one shape.
    """
    specs = {group.kv_cache_spec for group in config.kv_cache_groups}
    spec = specs.pop()
    if specs or not isinstance(spec, AttentionSpec):
        raise InvariantError(f"KV cache groups must share one attention spec, got {config}.")
    try:
        pallas_kernels.pad_slot(config.num_rows, config.num_blocks, spec.block_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    array = jax.ShapeDtypeStruct(
        (config.num_rows, config.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size),
        jnp.dtype(spec.dtype),
        sharding=kv_cache_sharding(mesh),
    )
    return KVCache(k=array, v=array)


def allocate_kv_cache(config: KVCacheConfig, mesh: Mesh) -> KVCache:
    """The cache, all zeros. Raises as `abstract_kv_cache` does."""
    return jax.tree.map(
        lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding),
        abstract_kv_cache(config, mesh),
    )
