"""Sorts rows into tiles so that each tile has rows of one group only."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.target import Target

# (rows of a tile, limit): the first size is used for which a group has fewer rows than the limit on
# average.
_LIMITS = ((8, 8), (16, 24), (64, 128), (128, math.inf))
_LIMITS_OF_PLATFORM = {"cpu": ((8, 32), (16, math.inf))}
# Platform -> the largest total number of rows for which each row gets a tile of its own.
_ALONE_UP_TO = {"cpu": 16}


class GroupTiles(NamedTuple):
    """The place of each row in the tiles of its group.

    Place p is row `p % tile_rows` of tile `p // tile_rows`. Tiles with rows come first, in the
    order of their groups. The last tile of a group may have empty places.

    Example: `group_ids` [2, 0, 2, 2, 1], 2 groups, tiles of 2 rows. Group id 2 means no group.
        -> places [6, 0, 6, 6, 2], groups [0, 1, 2], sizes [1, 1, 0]. Row 1 is at place 0 and row 4
        at place 2; place 6 does not exist.
    """

    rows: jax.Array  # i32[num_tiles * tile_rows], the row at each place; any row at empty places
    places: jax.Array  # i32[num_rows], the place of each row; num_tiles * tile_rows if it has none
    groups: jax.Array  # i32[num_tiles], the group of each tile; num_groups if it has no rows
    sizes: jax.Array  # i32[num_tiles], number of rows of each tile, at its first places


def num_tiles_of(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """The largest number of tiles that `num_rows` rows can need.

    Each group may have one tile that is not full.
    """
    num_partly_full = min(num_rows, num_groups)
    return num_partly_full + (num_rows - num_partly_full) // tile_rows


def make_group_tiles(
    group_ids: jax.Array,  # i32[num_rows], in [0, num_groups]
    *,
    num_groups: int,
    tile_rows: int,
) -> GroupTiles:
    """Sorts rows by group, and gives each row a place in a tile of its group.

    Rows with the group id `num_groups` belong to no group and get no place. No other row is
    dropped: there are as many tiles as the worst case needs.
    """
    (num_rows,) = group_ids.shape
    groups = jnp.arange(num_groups + 1, dtype=jnp.int32)
    order = jnp.argsort(group_ids, stable=True).astype(jnp.int32)
    # The first of the sorted rows of each group; the last entry is the number of all rows.
    starts = (group_ids[:, None] < groups).sum(axis=0, dtype=jnp.int32)
    sizes = starts[1:] - starts[:-1]
    tile_ends = jnp.cumsum((sizes + tile_rows - 1) // tile_rows, dtype=jnp.int32)
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends])

    num_tiles = num_tiles_of(num_rows, num_groups, tile_rows)
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    tile_groups = (tiles[:, None] >= tile_ends).sum(axis=1, dtype=jnp.int32)
    first_rows = starts[tile_groups] + (tiles - tile_starts[tile_groups]) * tile_rows
    is_used = tile_groups < num_groups
    tile_sizes = jnp.where(
        is_used, jnp.minimum(starts[tile_groups + is_used] - first_rows, tile_rows), 0
    )
    sorted_rows = (first_rows[:, None] + jnp.arange(tile_rows, dtype=jnp.int32)).reshape(-1)
    rows = order[jnp.minimum(sorted_rows, num_rows - 1)]

    own_group = group_ids[order]
    sorted_places = tile_starts[own_group] * tile_rows + jnp.arange(num_rows) - starts[own_group]
    sorted_places = jnp.where(own_group < num_groups, sorted_places, num_tiles * tile_rows)
    places = jnp.zeros(num_rows, jnp.int32).at[order].set(sorted_places, unique_indices=True)
    return GroupTiles(rows=rows, places=places, groups=tile_groups, sizes=tile_sizes)


def choose_tile_rows(num_rows: int, num_groups: int, target: Target) -> int:
    """Chooses the rows of a tile from the number of rows that a group gets on average.

    On a CPU, a few rows mostly belong to different groups, as the experts of one token do. Each row
    then gets its own tile. With more rows, the body itself saves work in tiles of few rows. The
    CPU's limits were measured with 8 to 128 groups of 512 x 1,024, JAX 0.10.2, one core with AVX2.

    The limits for other devices are guesses. A tile of few rows leaves most of a GPU's product
    empty. This costs time only if products, and not memory, limit the speed.
    """
    if target.platform in _ALONE_UP_TO and num_rows <= _ALONE_UP_TO[target.platform]:
        return 1
    limits = _LIMITS_OF_PLATFORM.get(target.platform, _LIMITS)
    per_group = num_rows / num_groups
    return next(tile_rows for tile_rows, limit in limits if per_group < limit)


def tile_row_choices(target: Target) -> tuple[int, ...]:
    """All values that `choose_tile_rows` can return for the target, in rising order."""
    alone = (1,) if target.platform in _ALONE_UP_TO else ()
    limits = _LIMITS_OF_PLATFORM.get(target.platform, _LIMITS)
    return (*alone, *(tile_rows for tile_rows, _ in limits))
