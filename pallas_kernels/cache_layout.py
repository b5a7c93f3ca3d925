"""The layout of the paged KV cache, and the slot that means "do not write".

A cache is `f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]`, one array for K and one
for V. A row serves one layer of every KV cache group; block ids are unique across groups.
A token's slot is `block_id * block_size + position % block_size`, counted inside one row.
"""

import jax

from pallas_kernels.argument_checks import require_not_empty, require_scalar, require_shape

INT32_MAX = 2**31 - 1
CACHE_DIMS = ("num_rows", "num_blocks", "num_kv_heads", "block_size")


def pad_slot(num_rows: int, num_blocks: int, block_size: int) -> int:
    """Returns the slot of padding tokens: past the end of the whole cache, not of one row.

    A kernel may add a row's offset to a slot. Past the end of one row would then be the first slot
    of the next: with 2 rows of 8 slots, padding at 8 written through row 0 hits row 1. Padding at
    16 stays outside for every row.

    Raises:
        ValueError: The padding slot plus the largest row offset does not fit int32.
    """
    num_slots = num_rows * num_blocks * block_size
    if 2 * num_slots > INT32_MAX:
        raise ValueError(
            f"KV cache has too many slots for int32 indices: got {num_slots} "
            f"({num_rows=}, {num_blocks=}, {block_size=}), wanted at most {INT32_MAX // 2}. "
            "Use fewer blocks."
        )
    return num_slots


def check_kv_caches(op_name: str, k_cache: jax.Array, v_cache: jax.Array) -> None:
    """Checks that K and V caches have the layout above and differ at most in head_dim.

    That of V may be 0: a cache of latents has no V.

    Raises:
        ValueError: They do not.
    """
    require_shape(op_name, "k_cache", k_cache, (*CACHE_DIMS, "head_dim"))
    require_not_empty(op_name, "k_cache", k_cache)
    require_shape(op_name, "v_cache", v_cache, (*k_cache.shape[:4], "v_head_dim"))


def check_row(op_name: str, row: jax.Array | int, num_rows: int) -> None:
    """Checks that `row` is an integer scalar, and in range when its value is known here.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(row, int):
        require_scalar(op_name, "row", row)
    elif not 0 <= row < num_rows:
        raise ValueError(f"{op_name}: row is out of range: got {row}, wanted [0, {num_rows}).")
