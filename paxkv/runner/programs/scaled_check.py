"""`CheckedScaledProduct`: compares the kernels for quantized matrices with plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.cache.self_test import MAX_RELATIVE_ERROR, relative_error
from models.loading.loaded_module import LoadedModule
from models.stored_kernels.scaled import ScaledKernel
from pallas_kernels.number_format import has_pairs
from paxkv.runner.programs.expert_check import NUM_EXPERTS, random_rows

# One for each size to which the kernel pads the rows: 8, 16, 32 and 64.
_NUM_ROWS = (5, 16, 32, 64)
# Larger matrices are cut to these sizes, because the kernel repeats the same work for the rest.
_MAX_GROUPS, _MAX_OUTPUTS = 12, 384


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedScaledProduct:
    """A `SelfTest` of a product with a matrix, or with matrices of experts.

    `scaled_matmul` describes the arrays.
    """

    num_groups: int
    bytes_per_group: int
    out_features: int
    number_format: pallas_kernels.NumberFormat
    has_zeros: bool
    dtype: str  # of activations
    is_of_experts: bool = False

    def why_kernels_differ(
        self, target: pallas_kernels.Target, *, implementation: str | None = None
    ) -> str | None:
        """Compares a product for each size of `_NUM_ROWS`, or of tiles of rows.

        Products that plain XLA computes anyway are left out. See `SelfTest.why_kernels_differ`.
        """
        matrix = self._random_matrix()
        sizes = pallas_kernels.tile_row_choices(target) if self.is_of_experts else _NUM_ROWS
        for num_rows in sizes:
            body = implementation or self._preferred_body(num_rows, matrix, target)
            if body == "xla":
                continue
            multiply = self._multiply_experts if self.is_of_experts else self._multiply
            got_np, expected_np = (
                np.asarray(multiply(num_rows, matrix, chosen), np.float32)
                for chosen in (body, "xla")
            )
            difference = relative_error(got_np, expected_np)
            if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
                rows = f"tiles of {num_rows}" if self.is_of_experts else f"{num_rows}"
                return (
                    f"the product of {rows} rows with {self.number_format} in groups of "
                    f"{self.bytes_per_group} bytes differs from XLA's by {difference:.3g} of its "
                    f"norm, more than {MAX_RELATIVE_ERROR}"
                )
        return None

    @property
    def in_features(self) -> int:
        numbers_per_byte = 2 if has_pairs(self.number_format) else 1
        return self.num_groups * self.bytes_per_group * numbers_per_byte

    def _preferred_body(
        self,
        num_rows: int,
        matrix: tuple[jax.Array | None, ...],
        target: pallas_kernels.Target,
    ) -> str:
        dtype, options = jnp.dtype(self.dtype), {"number_format": self.number_format}
        if not self.is_of_experts:
            x = jax.ShapeDtypeStruct((num_rows, self.in_features), dtype)
            return pallas_kernels.scaled_matmul_body(x, *matrix, target=target, **options)
        tiles = jax.ShapeDtypeStruct((NUM_EXPERTS,), jnp.int32)
        x = jax.ShapeDtypeStruct((NUM_EXPERTS * num_rows, self.in_features), dtype)
        return pallas_kernels.scaled_grouped_matmul_body(
            *(x, *matrix, tiles, tiles), target=target, **options
        )

    def _random_matrix(self) -> tuple[jax.Array | None, ...]:
        rng = np.random.default_rng(0)
        experts = (NUM_EXPERTS,) if self.is_of_experts else ()
        shape = (*experts, self.num_groups, self.bytes_per_group, self.out_features)
        numbers_np = rng.integers(0, 256, shape, np.uint8)
        if self.number_format == "e4m3":
            numbers_np &= 0xBF  # without the largest numbers and NaN
        if self.number_format == "int8":
            numbers_np = numbers_np.view(np.int8)
        scales_np = rng.uniform(0.5, 2, (*shape[:-2], shape[-1])).astype(np.float32)
        zeros_np = rng.integers(0, 16, scales_np.shape, np.uint8) if self.has_zeros else None
        arrays = jax.device_put((numbers_np, scales_np))
        return *arrays, None if zeros_np is None else jax.device_put(zeros_np)

    def _multiply(
        self, num_rows: int, matrix: tuple[jax.Array | None, ...], implementation: str
    ) -> jax.Array:  # f32[num_rows, out_features]
        drawn_np = np.random.default_rng(num_rows).standard_normal((num_rows, self.in_features))
        x = jax.device_put(drawn_np.astype(jnp.dtype(self.dtype)))

        @jax.jit
        def run(x: jax.Array, matrix: tuple[jax.Array | None, ...]) -> jax.Array:
            return pallas_kernels.scaled_matmul(
                *(x, *matrix), number_format=self.number_format, implementation=implementation
            )

        return run(x, matrix)

    def _multiply_experts(
        self, tile_rows: int, matrices: tuple[jax.Array | None, ...], implementation: str
    ) -> jax.Array:  # f[num_rows, out_features], zero for rows of no expert
        @jax.jit
        def run(
            rows: jax.Array, expert_ids: jax.Array, matrices: tuple[jax.Array | None, ...]
        ) -> jax.Array:
            tiles = pallas_kernels.make_group_tiles(
                expert_ids, num_groups=NUM_EXPERTS, tile_rows=tile_rows
            )
            y = pallas_kernels.scaled_grouped_matmul(
                *(rows[tiles.rows], *matrices, tiles.groups, tiles.sizes),
                number_format=self.number_format,
                implementation=implementation,
            )
            return y.at[tiles.places].get(mode="fill", fill_value=0)

        return run(*random_rows(tile_rows, self.in_features, self.dtype), matrices)


def scaled_products_of(module: LoadedModule) -> frozenset[CheckedScaledProduct]:
    """Returns the different products of one device with quantized matrices and experts.

    On a mesh, they are products with the device's parts of the matrices. Large matrices are cut.
    """
    values = module.parameters.values()
    dtypes = {
        value.dtype.name
        for value in values
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
    }
    matrices = [
        (value, value.numbers.sharding.shard_shape(value.numbers.shape))
        for value in values
        if isinstance(value, ScaledKernel) and value.num_panels == 1
    ]
    return frozenset(
        CheckedScaledProduct(
            min(num_groups, _MAX_GROUPS),
            num_bytes,
            _cut_outputs(out_features),
            matrix.number_format,
            matrix.zeros is not None,
            dtype,
            len(others) > 1,
        )
        for matrix, (*others, num_groups, num_bytes, out_features) in matrices
        for dtype in dtypes
    )


def _cut_outputs(out_features: int) -> int:
    """A smaller number of outputs, for which a CTA of the kernel has as many columns."""
    if out_features <= _MAX_OUTPUTS:
        return out_features
    return _MAX_OUTPUTS - 128 + out_features % 128
