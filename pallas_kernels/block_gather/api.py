"""Public op `block_gather`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_int32, require_shape
from pallas_kernels.block_gather.reference import block_gather_reference
from pallas_kernels.block_gather.xla import block_gather_xla
from pallas_kernels.cache_layout import check_kv_caches
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.target import Target

_BODIES: dict[str, Body] = {
    "reference": block_gather_reference,
    "xla": block_gather_xla,
    **mosaic_bodies("pallas_kernels.block_gather", "block_gather", "gpu"),
}


def block_gather(
    k_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array,  # i32[num_ids]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:  # [num_rows, num_ids, num_kv_heads, block_size, head_dim], V's
    """Copies whole blocks, of every row, out of the caches: to swap them out or to send them away.

    Values are copied bit by bit, of any dtype, a block's unwritten part too; only a NaN may become
    another NaN. `block_scatter` is the way back.

    Args:
        block_ids: Blocks to copy, in `[0, num_blocks)`; one may be copied several times. An entry
            from `num_blocks` on is padding: its place in the result is all zeros.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: `swap_blocks` in vllm/csrc/cache_kernels.cu.
    """
    check_kv_caches("block_gather", k_cache, v_cache)
    require_shape("block_gather", "block_ids", block_ids, ("num_ids",))
    require_int32("block_gather", block_ids=block_ids)
    arguments = (k_cache, v_cache, block_ids)
    return run_op("block_gather", _BODIES, implementation, target, *arguments)
