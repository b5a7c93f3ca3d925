"""Public op `block_copy`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_int32, require_shape
from pallas_kernels.block_copy.reference import block_copy_reference
from pallas_kernels.block_copy.xla import block_copy_xla
from pallas_kernels.cache_layout import check_kv_caches
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.target import Target

_BODIES: dict[str, Body] = {
    "reference": block_copy_reference,
    "xla": block_copy_xla,
    **mosaic_bodies("pallas_kernels.block_copy", "block_copy", "gpu"),
}


def block_copy(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    source_block_ids: jax.Array,  # i32[num_copies]
    target_block_ids: jax.Array,  # i32[num_copies]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:  # the two caches
    """Copies whole blocks over others, in every row, all of them at once.

    Every source is read as it was before the call: copies (A -> B) and (B -> C) leave the old B in
    C. In place when the caller donates the caches and rebinds them (on the CPU in float32, float16
    or int8, see `kv_scatter`); what is read waits in a buffer of at most `num_copies` blocks of one
    row. Values are copied as they are, of any dtype.

    Args:
        source_block_ids: Blocks to copy, in `[0, num_blocks)`; one may be copied several times.
        target_block_ids: Blocks to copy over, in `[0, num_blocks)`, no two alike. An entry from
            `num_blocks` on is padding and copies nothing, whatever its source is.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: `copy_blocks` in vllm/csrc/cache_kernels.cu.
    """
    check_kv_caches("block_copy", k_cache, v_cache)
    require_shape("block_copy", "source_block_ids", source_block_ids, ("num_copies",))
    wanted_targets = source_block_ids.shape
    require_shape("block_copy", "target_block_ids", target_block_ids, wanted_targets)
    require_int32(
        "block_copy", source_block_ids=source_block_ids, target_block_ids=target_block_ids
    )
    arguments = (k_cache, v_cache, source_block_ids, target_block_ids)
    return run_op("block_copy", _BODIES, implementation, target, *arguments)
