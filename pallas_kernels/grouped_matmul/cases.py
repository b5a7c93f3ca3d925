"""Named example inputs of `grouped_matmul`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.group_tiles import GroupTiles, make_group_tiles

# Compiled as one program per case, instead of one program per operation.
_make_group_tiles = jax.jit(make_group_tiles, static_argnames=("num_groups", "tile_rows"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulCase:
    """Sizes of one example.

    Args:
        group_sizes: The number of rows of each group; the rows are in random order.
        num_unrouted: The number of rows that belong to no group.
        is_stored_as_bits: Whether 16-bit weights are stored as uint16.
    """

    name: str
    group_sizes: tuple[int, ...]
    tile_rows: int
    num_unrouted: int = 0
    in_features: int = 64
    out_features: int = 128
    dtype: str = "float32"
    is_stored_as_bits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulInputs:
    """Arguments of `grouped_matmul`, and the rows and groups that they were made from."""

    x: jax.Array  # f[num_tiles * tile_rows, in_features]
    weights: jax.Array  # f or u16[num_groups, in_features, out_features]
    tiles: GroupTiles
    weights_dtype: jnp.dtype | None
    rows: jax.Array  # f[num_rows, in_features]
    group_ids: jax.Array  # i32[num_rows]

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The positional arguments, in order."""
        return self.x, self.weights, self.tiles.groups, self.tiles.sizes

    @property
    def options(self) -> dict[str, jnp.dtype | None]:
        """The static arguments, by name."""
        return {"weights_dtype": self.weights_dtype}


CASES: tuple[GroupedMatmulCase, ...] = (
    GroupedMatmulCase(name="one_row", group_sizes=(0, 1, 0), tile_rows=1),
    GroupedMatmulCase(name="one_row_a_tile", group_sizes=(2, 0, 1, 3), tile_rows=1),
    GroupedMatmulCase(name="part_tiles", group_sizes=(9, 1, 0, 8, 17), tile_rows=8),
    GroupedMatmulCase(name="unrouted", group_sizes=(3, 0, 5), tile_rows=8, num_unrouted=9),
    GroupedMatmulCase(name="all_unrouted", group_sizes=(0, 0), tile_rows=8, num_unrouted=4),
    GroupedMatmulCase(name="one_group_has_all", group_sizes=(0, 0, 70), tile_rows=16),
    GroupedMatmulCase(
        name="odd_widths", group_sizes=(3, 2), tile_rows=4, in_features=5, out_features=7
    ),
    GroupedMatmulCase(name="bfloat16", group_sizes=(9, 0, 4), tile_rows=8, dtype="bfloat16"),
    GroupedMatmulCase(
        name="bfloat16_tiles_of_16", group_sizes=(20, 0, 4, 1), tile_rows=16, dtype="bfloat16"
    ),
    GroupedMatmulCase(
        name="bfloat16_tiles_of_64",
        group_sizes=(70, 0, 3),
        tile_rows=64,
        in_features=256,
        dtype="bfloat16",
    ),
    GroupedMatmulCase(
        name="bfloat16_columns_of_64",
        group_sizes=(3, 0, 9),
        tile_rows=8,
        out_features=192,
        dtype="bfloat16",
    ),
    GroupedMatmulCase(
        name="bfloat16_tiles_and_columns_of_64",
        group_sizes=(65, 3),
        tile_rows=64,
        out_features=64,
        dtype="bfloat16",
    ),
    GroupedMatmulCase(
        name="bfloat16_as_bits",
        group_sizes=(5, 4),
        tile_rows=8,
        dtype="bfloat16",
        is_stored_as_bits=True,
    ),
    GroupedMatmulCase(
        name="float16_as_bits",
        group_sizes=(1, 2),
        tile_rows=1,
        dtype="float16",
        is_stored_as_bits=True,
    ),
)


def build_inputs(case: GroupedMatmulCase, seed: int = 0) -> GroupedMatmulInputs:
    """Draws rows and matrices. Unrouted rows, and matrices of groups without rows, are NaN."""
    rng = np.random.default_rng(seed)
    num_groups = len(case.group_sizes)
    sizes = (*case.group_sizes, case.num_unrouted)
    group_ids_np = rng.permutation(np.repeat(np.arange(num_groups + 1), sizes))
    rows_np = rng.standard_normal((len(group_ids_np), case.in_features))
    rows_np[group_ids_np == num_groups] = np.nan
    weights_np = rng.standard_normal((num_groups, case.in_features, case.out_features))
    weights_np[np.array(case.group_sizes) == 0] = np.nan
    # NumPy casts without compiling a program, and `jnp.asarray` compiles one for each shape.
    dtype = jnp.dtype(case.dtype)
    rows_np = rows_np.astype(dtype)
    weights_np = (weights_np / case.in_features**0.5).astype(dtype)
    if case.is_stored_as_bits:
        weights_np = weights_np.view(np.uint16)
    group_ids = jax.device_put(group_ids_np.astype(np.int32))
    tiles = _make_group_tiles(group_ids, num_groups=num_groups, tile_rows=case.tile_rows)
    return GroupedMatmulInputs(
        x=jax.device_put(rows_np[np.asarray(tiles.rows)]),
        weights=jax.device_put(weights_np),
        tiles=tiles,
        weights_dtype=dtype if case.is_stored_as_bits else None,
        rows=jax.device_put(rows_np),
        group_ids=group_ids,
    )
