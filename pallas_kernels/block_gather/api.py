"""Public op `block_gather`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_int32, require_shape
from pallas_kernels.block_gather.reference import block_gather_reference
from pallas_kernels.block_gather.xla import block_gather_xla
from pallas_kernels.cache_layout import check_pages
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.target import Target

_BODIES: dict[str, Body] = {
    "reference": block_gather_reference,
    "xla": block_gather_xla,
    **mosaic_bodies("pallas_kernels.block_gather", "block_gather", "gpu"),
}


def block_gather(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    block_ids: jax.Array,  # i32[num_ids]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # [num_rows, num_ids, ...]
    """Copies whole blocks of every row out of the cache, to swap them out or to send them.

    Values of any dtype keep their bits, except that a NaN may become another NaN. The unwritten
    part of a block is copied too. `block_scatter` writes the blocks back.

    Args:
        pages: The contents of blocks, with at least one axis after `num_blocks`, as in
            `block_copy`.
        block_ids: Blocks to copy, in `[0, num_blocks)`; a block may be copied several times. An
            entry of `num_blocks` or more is padding: its place in the result is all zeros.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: `swap_blocks` in vllm/csrc/cache_kernels.cu.
    """
    check_pages("block_gather", pages)
    require_shape("block_gather", "block_ids", block_ids, ("num_ids",))
    require_int32("block_gather", block_ids=block_ids)
    return run_op("block_gather", _BODIES, implementation, target, pages, block_ids)
