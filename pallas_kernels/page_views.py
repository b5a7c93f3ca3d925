"""Views of the raw KV cache as pages of attention, which need no copy in a compiled program.

The cache is one raw array. A page (one block in one row) holds `num_parts` parts, one after the
other: K and V, or a single part if a token has one vector for all heads (MLA latents). The ops view
the array as `f[num_rows, num_parts * num_blocks, num_kv_heads, block_size, head_dim]`. Part i of
block b is at index `num_parts * b + i` of the second axis.

There are two forms of storage, both in the dtype of the view:

- words, `[num_rows, num_blocks, num_words]`, on GPUs and CPUs. The view is a reshape.
- lines of 128 elements, `[num_rows, num_blocks, num_lines, 128]`, on TPUs. A TPU stores an array of
  16-bit or 32-bit elements in tiles of 8 x 128 of its last two axes. The view keeps the tiles in
  their order in memory, so that XLA makes it a bitcast; a reshape with head_dim 256 would move the
  cache. Element (offset, dim) of a part's head is in lane `dim % 128` of the page's line
  `((head_idx * (block_size // 8) + offset // 8) * (head_dim // 128) + dim // 128) * 8 + offset % 8`
  where `head_idx = part * num_kv_heads + head`. With head_dim 128 this too is a reshape.
"""

import math

import jax

LANES = 128
ROW_TILE = 8  # rows of a tile; a TPU packs narrow elements inside a tile, not across tiles

_WORD_DIMS = "[num_rows, num_blocks, num_words]"
_LINE_DIMS = f"[num_rows, num_blocks, num_lines, {LANES}]"


def view_pages(
    pages: jax.Array,
    *,
    num_parts: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
) -> jax.Array:
    """Views raw pages as pages of attention.

    Args:
        pages: Raw pages of any dtype, `[num_rows, num_blocks, num_words]` or
            `[num_rows, num_blocks, num_lines, 128]`.
        num_parts: 2 for K and V, 1 for latents.
        block_size: Tokens in a block; for lines a multiple of 8.
        head_dim: Elements of a head; for lines a multiple of 128.

    Returns:
        `[num_rows, num_parts * num_blocks, num_kv_heads, block_size, head_dim]`, of the same dtype.

    Raises:
        ValueError: The parts do not fill a page, or do not fill whole tiles of lines.
    """
    if num_parts not in (1, 2):
        raise ValueError(f"view_pages: num_parts must be 1 or 2: got {num_parts}.")
    part_shape = (num_kv_heads, block_size, head_dim)
    _check_form("view_pages", pages.shape)
    _check_page("view_pages", pages.shape, num_parts, part_shape)
    num_rows, num_blocks = pages.shape[:2]
    view_shape = (num_rows, num_parts * num_blocks, *part_shape)
    if len(pages.shape) == 3:
        return pages.reshape(view_shape)
    num_tile_rows, num_tile_columns = block_size // ROW_TILE, head_dim // LANES
    tiles = pages.reshape(
        *(num_rows, num_parts * num_blocks, num_kv_heads),
        *(num_tile_rows, num_tile_columns, ROW_TILE, LANES),
    )
    return tiles.swapaxes(-3, -2).reshape(view_shape)


def unview_pages(view: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns raw pages of `shape` from their view; the inverse of `view_pages`.

    Args:
        view: `[num_rows, num_parts * num_blocks, num_kv_heads, block_size, head_dim]`.
        shape: Shape of the raw pages, `[num_rows, num_blocks, num_words]` or
            `[num_rows, num_blocks, num_lines, 128]`.

    Raises:
        ValueError: `view_pages` makes no such view of pages of this shape.
    """
    if len(view.shape) != 5:
        raise ValueError(
            f"unview_pages: view has the wrong shape: got {list(view.shape)}, wanted "
            "[num_rows, num_parts * num_blocks, num_kv_heads, block_size, head_dim]."
        )
    _check_form("unview_pages", shape)
    num_rows, num_blocks = shape[:2]
    num_parts = 2 if view.shape[1] == 2 * num_blocks else 1
    if view.shape[:2] != (num_rows, num_parts * num_blocks):
        raise ValueError(
            f"unview_pages: view does not match the raw shape: got {list(view.shape)} for "
            f"{list(shape)}, wanted {num_rows} rows and one or two times {num_blocks} blocks."
        )
    _check_page("unview_pages", shape, num_parts, view.shape[2:])
    if len(shape) == 3:
        return view.reshape(shape)
    *leading, block_size, head_dim = view.shape
    num_tile_rows, num_tile_columns = block_size // ROW_TILE, head_dim // LANES
    tiles = view.reshape(*leading, num_tile_rows, ROW_TILE, num_tile_columns, LANES)
    return tiles.swapaxes(-3, -2).reshape(shape)


def _check_form(op_name: str, raw_shape: tuple[int, ...]) -> None:
    """Checks that raw pages are words or lines."""
    if len(raw_shape) != 3 and not (len(raw_shape) == 4 and raw_shape[3] == LANES):
        raise ValueError(
            f"{op_name}: raw pages have the wrong shape: got {list(raw_shape)}, "
            f"wanted {_WORD_DIMS} or {_LINE_DIMS}."
        )


def _check_page(
    op_name: str,
    raw_shape: tuple[int, ...],
    num_parts: int,
    part_shape: tuple[int, ...],  # num_kv_heads, block_size, head_dim
) -> None:
    """Checks that parts of this shape fill a raw page, and whole tiles if it consists of lines."""
    has_lines = len(raw_shape) == 4
    _, block_size, head_dim = part_shape
    if has_lines and head_dim % LANES:
        raise ValueError(
            f"{op_name}: head_dim does not fill lines of {LANES}: got {head_dim}, wanted a "
            f"multiple of {LANES}. Pad the heads, or store the pages as {_WORD_DIMS}."
        )
    if has_lines and block_size % ROW_TILE:
        raise ValueError(
            f"{op_name}: block_size does not fill tiles of {ROW_TILE} rows: got {block_size}, "
            f"wanted a multiple of {ROW_TILE}."
        )
    got, wanted = math.prod(raw_shape[2:]), num_parts * math.prod(part_shape)
    if got != wanted:
        raise ValueError(
            f"{op_name}: a raw page has the wrong number of elements: got {got} in pages of "
            f"{list(raw_shape[2:])}, wanted {wanted} for {num_parts} of [num_kv_heads, block_size, "
            f"head_dim] = {list(part_shape)}."
        )
