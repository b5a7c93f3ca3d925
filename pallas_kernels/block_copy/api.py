"""Public op `block_copy`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_int32, require_shape
from pallas_kernels.block_copy.reference import block_copy_reference
from pallas_kernels.block_copy.xla import block_copy_xla
from pallas_kernels.cache_layout import check_pages
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.target import Target

_BODIES: dict[str, Body] = {
    "reference": block_copy_reference,
    "xla": block_copy_xla,
    **mosaic_bodies("pallas_kernels.block_copy", "block_copy", "gpu"),
}


def block_copy(
    pages: jax.Array,  # [num_rows, num_blocks, ...]
    source_block_ids: jax.Array,  # i32[num_copies]
    target_block_ids: jax.Array,  # i32[num_copies]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # the pages
    """Copies whole blocks over other blocks, in every row.

    Every source is read as it was before the call: copies (A -> B) and (B -> C) leave the old B in
    C. The copy is in place if the caller donates the pages and rebinds them; on the CPU only for
    float32, float16, int8 and uint16 (see `kv_scatter`). A temporary buffer holds at most
    `num_copies` blocks of one row. Values of any dtype keep their bits.

    Args:
        pages: The contents of blocks, with at least one axis after `num_blocks`: raw words, or a
            cache of latents. A `kv_cache` of keys and values has two entries per block; reshape it.
        source_block_ids: Blocks to copy, in `[0, num_blocks)`; a block may be copied several times.
        target_block_ids: Blocks to overwrite, in `[0, num_blocks)`, all different. An entry of
            `num_blocks` or more is padding: its source may be anything and is not copied.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: `copy_blocks` in vllm/csrc/cache_kernels.cu.
    """
    check_pages("block_copy", pages)
    require_shape("block_copy", "source_block_ids", source_block_ids, ("num_copies",))
    wanted_targets = source_block_ids.shape
    require_shape("block_copy", "target_block_ids", target_block_ids, wanted_targets)
    require_int32(
        "block_copy", source_block_ids=source_block_ids, target_block_ids=target_block_ids
    )
    arguments = (pages, source_block_ids, target_block_ids)
    return run_op("block_copy", _BODIES, implementation, target, *arguments)
