"""The pages of the KV cache on the device: dtype, sharding and allocation."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import pallas_kernels
from models import Pages, Platform
from models.forward.kernel_settings import PAGES_BY_DEVICE
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.errors import ConfigError


def kv_cache_dtype(model_dtype: str, platform: Platform, wanted: str = "auto") -> str:
    """Returns the dtype of stored keys and values.

    Args:
        wanted: `CacheConfig.kv_cache_dtype`.

    Raises:
        ConfigError: The platform cannot store them in the wanted dtype.
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


def abstract_kv_cache(
    config: KVCacheConfig, mesh: Mesh, platform: Platform, kv_dtype: str
) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of the pages, for compiling without allocating them.

    Each device has a page of every row and block, for its own heads. In the array of all devices,
    these pages are side by side along the third axis.

    Args:
        config: Of one device.
        kv_dtype: The dtype of keys and values.

    Raises:
        ConfigError: The cache has more slots than an int32 can count.
    """
    page_tokens = max(group.kv_cache_spec.page_tokens for group in config.kv_cache_groups)
    try:
        pallas_kernels.pad_slot(config.num_rows, config.num_blocks, page_tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    (num_rows, num_blocks, width, *lanes), dtype = _shape_and_dtype(config, platform, kv_dtype)
    shape = (num_rows, num_blocks, width * mesh.size, *lanes)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PAGES_BY_DEVICE))


def empty_kv_cache(
    config: KVCacheConfig, platform: Platform, kv_dtype: str, mesh: Mesh | None = None
) -> Pages:
    """Makes pages of zeros inside a program, on one device or split as by `abstract_kv_cache`."""
    if mesh is None:
        return jnp.zeros(*_shape_and_dtype(config, platform, kv_dtype))
    pages = abstract_kv_cache(config, mesh, platform, kv_dtype)
    return jax.lax.with_sharding_constraint(jnp.zeros(pages.shape, pages.dtype), pages.sharding)


def _shape_and_dtype(
    config: KVCacheConfig, platform: Platform, kv_dtype: str
) -> tuple[tuple[int, ...], jnp.dtype]:
    """Returns the shape and dtype of the pages. The pages of all groups have the same size."""
    dtype = jnp.dtype(platform.page_dtype(kv_dtype))
    page_bytes = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    page = platform.page_shape(page_bytes // dtype.itemsize)
    return (config.num_rows, config.num_blocks, *page), dtype


def allocate_kv_cache(
    config: KVCacheConfig, mesh: Mesh, platform: Platform, kv_dtype: str
) -> Pages:
    """Allocates the pages, filled with zeros.

    Raises:
        ConfigError: The device has no memory for the pages. See also `abstract_kv_cache`.
    """
    pages = abstract_kv_cache(config, mesh, platform, kv_dtype)
    try:
        return platform.allocate_zeros(pages.shape, pages.dtype, pages.sharding)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        reason = str(error).rstrip(".")
        num_mib = pages.size * pages.dtype.itemsize >> 20
        raise ConfigError(
            f"there is no memory for a KV cache of {num_mib:,} MiB ({config.num_blocks} blocks): "
            f"{reason}. Set a smaller cpu_kv_cache_bytes on the CPU, elsewhere a smaller "
            "gpu_memory_utilization; or num_gpu_blocks_override."
        ) from error
