"""Named example inputs of `scaled_matmul`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

from pallas_kernels.number_format import NumberFormat, has_pairs

_SMALL_FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMatmulCase:
    """Sizes of one example.

    Args:
        has_zeros: Whether zero points are given.
        has_exponents: Whether scales are powers of two, stored as bytes.
    """

    name: str
    number_format: NumberFormat
    num_rows: int = 3
    num_groups: int = 2
    group_size: int = 32
    out_features: int = 128
    dtype: str = "float32"
    has_zeros: bool = False
    has_exponents: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMatmulInputs:
    """Arguments of `scaled_matmul`, and the matrix that they stand for."""

    x: jax.Array  # f[num_rows, in_features]
    numbers: jax.Array  # u8 or i8[num_groups, bytes_per_group, out_features]
    scales: jax.Array  # f32 or u8[num_groups, out_features]
    zeros: jax.Array | None  # u8[num_groups, out_features]
    number_format: NumberFormat
    weights_np: np.ndarray  # f64[in_features, out_features]

    @property
    def arrays(self) -> tuple[jax.Array | None, ...]:
        """The positional arguments, in order."""
        return self.x, self.numbers, self.scales, self.zeros

    @property
    def options(self) -> dict[str, NumberFormat]:
        """The static arguments, by name."""
        return {"number_format": self.number_format}


CASES: tuple[ScaledMatmulCase, ...] = (
    ScaledMatmulCase(name="int8", number_format="int8"),
    ScaledMatmulCase(name="int8_odd_widths", number_format="int8", group_size=5, out_features=7),
    ScaledMatmulCase(name="int4", number_format="int4"),
    ScaledMatmulCase(name="int4_zeros", number_format="int4", has_zeros=True),
    ScaledMatmulCase(name="e4m3", number_format="e4m3"),
    ScaledMatmulCase(name="e2m1", number_format="e2m1", has_exponents=True),
    ScaledMatmulCase(
        name="int8_bfloat16", number_format="int8", group_size=128, num_rows=9, dtype="bfloat16"
    ),
    # One scale per output: a group has several pieces, which two CTAs share.
    ScaledMatmulCase(
        name="int8_per_output_bfloat16",
        number_format="int8",
        num_groups=1,
        group_size=512,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="int8_groups_of_32_bfloat16",
        number_format="int8",
        out_features=64,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="int4_groups_of_32_bfloat16",
        number_format="int4",
        num_groups=9,
        num_rows=17,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="int4_groups_of_64_zeros_bfloat16",
        number_format="int4",
        num_groups=5,
        group_size=64,
        out_features=192,
        has_zeros=True,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="int4_groups_of_128_bfloat16",
        number_format="int4",
        group_size=128,
        num_rows=64,
        out_features=256,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="int4_per_output_zeros_bfloat16",
        number_format="int4",
        num_groups=1,
        group_size=256,
        has_zeros=True,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="e4m3_bfloat16",
        number_format="e4m3",
        num_groups=9,
        group_size=128,
        num_rows=16,
        out_features=256,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="int4_exponents_bfloat16",
        number_format="int4",
        group_size=64,
        has_exponents=True,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="e2m1_bfloat16",
        number_format="e2m1",
        num_groups=5,
        num_rows=17,
        has_exponents=True,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(
        name="e2m1_groups_of_128_bfloat16",
        number_format="e2m1",
        group_size=128,
        has_exponents=True,
        dtype="bfloat16",
    ),
    ScaledMatmulCase(name="int8_float16", number_format="int8", dtype="float16"),
)


def build_inputs(case: ScaledMatmulCase, seed: int = 0) -> ScaledMatmulInputs:
    """Draws rows and numbers. Products are near 1."""
    rng = np.random.default_rng(seed)
    shape = (case.num_groups, case.group_size, case.out_features)
    codes_np, values_np = _draw_numbers(rng, shape, case.number_format)
    zeros_np = None
    if case.has_zeros:
        zeros_np = rng.integers(0, 16, (shape[0], shape[2]), np.uint8)
        values_np = values_np + 8 - zeros_np.astype(np.float64)[:, None]
    size = float(np.sqrt((values_np**2).mean() * shape[0] * shape[1]))
    if case.has_exponents:
        scales_np = rng.integers(-1, 2, (shape[0], shape[2])) - int(np.log2(size)) + 127
        scales_np = scales_np.astype(np.uint8)
        factors_np = 2.0 ** (scales_np.astype(np.float64) - 127)
    else:
        scales_np = (rng.uniform(0.5, 2, (shape[0], shape[2])) / size).astype(np.float32)
        factors_np = scales_np.astype(np.float64)
    if has_pairs(case.number_format):
        low_np, high_np = np.split(codes_np, 2, axis=1)
        codes_np = low_np | high_np << 4
    x_np = rng.standard_normal((case.num_rows, shape[0] * shape[1])).astype(case.dtype)
    return ScaledMatmulInputs(
        x=jax.device_put(x_np),
        numbers=jax.device_put(codes_np),
        scales=jax.device_put(scales_np),
        zeros=None if zeros_np is None else jax.device_put(zeros_np),
        number_format=case.number_format,
        weights_np=(values_np * factors_np[:, None]).reshape(-1, shape[2]),
    )


def _draw_numbers(
    rng: np.random.Generator, shape: tuple[int, ...], number_format: NumberFormat
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers as they are stored, each in a byte of its own, and as float64 of equal shape.

    The floats of int4 are the stored numbers minus 8. Every code may occur, except NaN.
    """
    if number_format == "int8":
        codes_np = rng.integers(-128, 128, shape, np.int8)
        return codes_np, codes_np.astype(np.float64)
    if number_format == "int4":
        codes_np = rng.integers(0, 16, shape, np.uint8)
        return codes_np, codes_np.astype(np.float64) - 8
    num_codes = 128 if number_format == "e4m3" else 8
    # The largest code of e4m3 is NaN.
    codes_np = rng.integers(0, num_codes - (number_format == "e4m3"), shape, np.uint8)
    codes_np += rng.integers(0, 2, shape, np.uint8) * np.uint8(num_codes)
    return codes_np, codes_np.view(_SMALL_FLOATS[number_format]).astype(np.float64)
