"""Public op `block_scatter`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_int32, require_shape
from pallas_kernels.block_scatter.reference import block_scatter_reference
from pallas_kernels.block_scatter.xla import block_scatter_xla
from pallas_kernels.cache_layout import check_pages
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.target import Target

_BODIES: dict[str, Body] = {
    "reference": block_scatter_reference,
    "xla": block_scatter_xla,
    **mosaic_bodies("pallas_kernels.block_scatter", "block_scatter", "gpu"),
}


def block_scatter(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    values: jax.Array,  # of the pages' dtype, [num_rows, num_ids, ...]
    block_ids: jax.Array,  # i32[num_ids]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # the pages
    """Writes whole blocks of every row into the cache, to swap them in or to receive them.

    The inverse of `block_gather`; the target blocks may have other ids. Values keep their bits, as
    in `block_gather`. The write is in place if the caller donates the pages and rebinds them (on
    the CPU, see `kv_scatter`).

    Args:
        pages: The contents of blocks, with at least one axis after `num_blocks`, as in
            `block_copy`.
        values: What `block_gather` returned.
        block_ids: The target of each block, in `[0, num_blocks)`, all different. An entry of
            `num_blocks` or more is padding and not written.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: `swap_blocks` in vllm/csrc/cache_kernels.cu.
    """
    check_pages("block_scatter", pages)
    require_shape("block_scatter", "block_ids", block_ids, ("num_ids",))
    require_int32("block_scatter", block_ids=block_ids)
    wanted = (pages.shape[0], block_ids.shape[0], *pages.shape[2:])
    require_shape("block_scatter", "values", values, wanted)
    if values.dtype != pages.dtype:
        raise ValueError(
            f"block_scatter: values has the wrong dtype: got {values.dtype}, "
            f"wanted that of the pages, {pages.dtype}."
        )
    return run_op("block_scatter", _BODIES, implementation, target, pages, values, block_ids)
