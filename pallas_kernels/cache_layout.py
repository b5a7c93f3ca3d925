"""The layout of the paged KV cache, and the slot that means "do not write".

A cache is one array, `f[num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]`. The keys of
block b are at index 2 * b of its second axis, its values at 2 * b + 1, so that a page (one block of
one row) is `[K half | V half]`. V is as wide as K; callers pad a narrower V. If a token has one
vector for both (a latent of MLA), a block has one part and the second axis is `num_blocks`. A row
stores one layer of every KV cache group; block ids are unique across groups. A token's slot inside
one row is `block_id * block_size + position % block_size`.
"""

import jax

from pallas_kernels.argument_checks import require_not_empty, require_scalar, require_shape

INT32_MAX = 2**31 - 1


def pad_slot(num_rows: int, num_blocks: int, block_size: int) -> int:
    """Returns the slot of padding tokens: past the end of the whole cache, not of one row.

    A kernel may add a row's offset to a slot. A slot just past the end of one row would then be
    the first slot of the next: with 2 rows of 8 slots, padding at slot 8 of row 0 would be written
    to row 1. Padding at slot 16 is outside the cache for every row.

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


def check_kv_cache(op_name: str, kv_cache: jax.Array, num_parts: int) -> None:
    """Checks that a cache whose blocks have 1 or 2 parts (K and V) has the layout above.

    Raises:
        ValueError: It does not.
    """
    wanted = ("num_rows", f"{num_parts} * num_blocks" if num_parts > 1 else "num_blocks")
    wanted += ("num_kv_heads", "block_size", "head_dim")
    require_shape(op_name, "kv_cache", kv_cache, wanted)
    require_not_empty(op_name, "kv_cache", kv_cache)
    if kv_cache.shape[1] % num_parts:
        raise ValueError(
            f"{op_name}: kv_cache has the wrong shape: got {list(kv_cache.shape)}, wanted "
            f"{num_parts} entries of its second axis per block, the keys and then the values."
        )


def check_pages(op_name: str, pages: jax.Array) -> None:
    """Checks that an array is `[num_rows, num_blocks, ...]`, with one trailing axis or more.

    Raises:
        ValueError: It is not, or it is empty.
    """
    trailing = ("words",) if len(pages.shape) < 3 else pages.shape[2:]
    require_shape(op_name, "pages", pages, ("num_rows", "num_blocks", *trailing))
    require_not_empty(op_name, "pages", pages)


def check_row(op_name: str, row: jax.Array | int, num_rows: int) -> None:
    """Checks that `row` is an integer scalar, and in range when its value is known here.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(row, int):
        require_scalar(op_name, "row", row)
    elif not 0 <= row < num_rows:
        raise ValueError(f"{op_name}: row is out of range: got {row}, wanted [0, {num_rows}).")
