"""Named example inputs of `scaled_grouped_matmul`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import numpy as np

from pallas_kernels.grouped_matmul.cases import GroupedMatmulCase
from pallas_kernels.grouped_matmul.cases import build_inputs as build_rows
from pallas_kernels.grouped_matmul.group_tiles import GroupTiles
from pallas_kernels.number_format import NumberFormat
from pallas_kernels.scaled_matmul.cases import ScaledMatmulCase
from pallas_kernels.scaled_matmul.cases import build_inputs as build_matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledGroupedMatmulCase:
    """Sizes of one example.

    Args:
        expert_sizes: The number of rows of each expert; the rows are in random order.
        num_unrouted: The number of rows that belong to no expert.
        matrix: The form of the matrices; its rows are not used.
    """

    name: str
    expert_sizes: tuple[int, ...]
    tile_rows: int
    matrix: ScaledMatmulCase
    num_unrouted: int = 0

    @property
    def dtype(self) -> str:
        return self.matrix.dtype

    @property
    def out_features(self) -> int:
        return self.matrix.out_features


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledGroupedMatmulInputs:
    """Arguments of `scaled_grouped_matmul`, and the rows and matrices that they stand for."""

    x: jax.Array  # f[num_tiles * tile_rows, in_features]
    matrices: tuple[jax.Array | None, ...]  # numbers, scales and zeros
    tiles: GroupTiles
    number_format: NumberFormat
    rows: jax.Array  # f[num_rows, in_features]
    group_ids: jax.Array  # i32[num_rows], the expert of each row
    weights: np.ndarray  # f64[num_experts, in_features, out_features]
    weights_dtype: None = None

    @property
    def arrays(self) -> tuple[jax.Array | None, ...]:
        """The positional arguments, in order."""
        return self.x, *self.matrices, self.tiles.groups, self.tiles.sizes

    @property
    def options(self) -> dict[str, NumberFormat]:
        """The static arguments, by name."""
        return {"number_format": self.number_format}


def _matrix(number_format: NumberFormat, **changes: object) -> ScaledMatmulCase:
    fields = {"name": number_format, "number_format": number_format, "dtype": "bfloat16"}
    return ScaledMatmulCase(**{**fields, **changes})


CASES: tuple[ScaledGroupedMatmulCase, ...] = (
    ScaledGroupedMatmulCase(
        name="int8",
        expert_sizes=(3, 0, 5),
        tile_rows=4,
        matrix=_matrix("int8", group_size=5, out_features=7, dtype="float32"),
        num_unrouted=2,
    ),
    ScaledGroupedMatmulCase(
        name="e2m1",
        expert_sizes=(1, 0, 2),
        tile_rows=1,
        matrix=_matrix("e2m1", has_exponents=True, dtype="float32"),
    ),
    ScaledGroupedMatmulCase(
        name="int4_tiles_of_8_bfloat16",
        expert_sizes=(9, 0, 4),
        tile_rows=8,
        matrix=_matrix("int4", num_groups=5),
        num_unrouted=3,
    ),
    ScaledGroupedMatmulCase(
        name="int4_zeros_bfloat16",
        expert_sizes=(2, 17),
        tile_rows=16,
        matrix=_matrix("int4", group_size=64, out_features=192, has_zeros=True),
    ),
    ScaledGroupedMatmulCase(
        name="e4m3_tiles_of_128_bfloat16",
        expert_sizes=(0, 130, 1),
        tile_rows=128,
        matrix=_matrix("e4m3", group_size=128),
    ),
    ScaledGroupedMatmulCase(
        name="int8_tiles_of_64_bfloat16",
        expert_sizes=(65, 3),
        tile_rows=64,
        matrix=_matrix("int8", group_size=128, out_features=64, has_exponents=True),
    ),
    ScaledGroupedMatmulCase(
        name="e2m1_bfloat16",
        expert_sizes=(3, 0, 9),
        tile_rows=8,
        matrix=_matrix("e2m1", has_exponents=True, out_features=192),
    ),
    ScaledGroupedMatmulCase(
        name="no_rows_bfloat16",
        expert_sizes=(0, 0),
        tile_rows=8,
        matrix=_matrix("int4"),
        num_unrouted=4,
    ),
)


def build_inputs(case: ScaledGroupedMatmulCase, seed: int = 0) -> ScaledGroupedMatmulInputs:
    """Draws rows and matrices. Scales of experts without rows are NaN, or the largest exponent."""
    matrix = case.matrix
    rows = build_rows(
        GroupedMatmulCase(
            name=case.name,
            group_sizes=case.expert_sizes,
            tile_rows=case.tile_rows,
            num_unrouted=case.num_unrouted,
            in_features=matrix.num_groups * matrix.group_size,
            out_features=1,
            dtype=matrix.dtype,
        ),
        seed,
    )
    drawn = [build_matrix(matrix, seed + expert) for expert in range(len(case.expert_sizes))]
    numbers_np, scales_np = (
        np.stack([np.asarray(getattr(own, name)) for own in drawn])
        for name in ("numbers", "scales")
    )
    unused = np.array(case.expert_sizes) == 0
    scales_np[unused] = 255 if scales_np.dtype == np.uint8 else np.nan
    zeros = None
    if matrix.has_zeros:
        zeros = jax.device_put(np.stack([np.asarray(own.zeros) for own in drawn]))
    return ScaledGroupedMatmulInputs(
        x=rows.x,
        matrices=(jax.device_put(numbers_np), jax.device_put(scales_np), zeros),
        tiles=rows.tiles,
        number_format=matrix.number_format,
        rows=rows.rows,
        group_ids=rows.group_ids,
        weights=np.stack([own.weights_np for own in drawn]),
    )
