"""Public op `block_scatter`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_int32, require_shape
from pallas_kernels.block_scatter.reference import block_scatter_reference
from pallas_kernels.block_scatter.xla import block_scatter_xla
from pallas_kernels.cache_layout import check_kv_caches
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.target import Target

_BODIES: dict[str, Body] = {
    "reference": block_scatter_reference,
    "xla": block_scatter_xla,
    **mosaic_bodies("pallas_kernels.block_scatter", "block_scatter", "gpu"),
}


def block_scatter(
    k_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k_blocks: jax.Array,  # as k_cache, [num_rows, num_ids, num_kv_heads, block_size, head_dim]
    v_blocks: jax.Array,  # as v_cache, [num_rows, num_ids, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array,  # i32[num_ids]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:  # the two caches
    """Writes whole blocks, of every row, into the caches: to swap them in or to receive them.

    The way back of `block_gather`, into the same blocks or others; values are copied likewise. In
    place when the caller donates the caches and rebinds them (on the CPU see `kv_scatter`).

    Args:
        block_ids: Where each block goes, in `[0, num_blocks)`, no two alike. An entry from
            `num_blocks` on is padding and written nowhere.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: `swap_blocks` in vllm/csrc/cache_kernels.cu.
    """
    check_kv_caches("block_scatter", k_cache, v_cache)
    require_shape("block_scatter", "block_ids", block_ids, ("num_ids",))
    require_int32("block_scatter", block_ids=block_ids)
    (num_ids,) = block_ids.shape
    for name, cache, blocks in (("k", k_cache, k_blocks), ("v", v_cache, v_blocks)):
        wanted = (cache.shape[0], num_ids, *cache.shape[2:])
        require_shape("block_scatter", f"{name}_blocks", blocks, wanted)
        if blocks.dtype != cache.dtype:
            raise ValueError(
                f"block_scatter: {name}_blocks has the wrong dtype: got {blocks.dtype}, "
                f"wanted the cache's, {cache.dtype}."
            )
    arguments = (k_cache, v_cache, k_blocks, v_blocks, block_ids)
    return run_op("block_scatter", _BODIES, implementation, target, *arguments)
