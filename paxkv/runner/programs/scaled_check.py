"""`CheckedScaledProduct`: compares the kernel for quantized matrices with plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.cache.self_test import MAX_RELATIVE_ERROR, relative_error
from models.loading.loaded_module import LoadedModule
from models.stored_kernels.scaled import ScaledKernel
from pallas_kernels.number_format import has_pairs

# One for each size to which the kernel pads the rows: 8, 16, 32 and 64.
_NUM_ROWS = (5, 16, 32, 64)
# Larger matrices are cut to these sizes, because the kernel repeats the same work for the rest.
_MAX_GROUPS, _MAX_OUTPUTS = 12, 384


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedScaledProduct:
    """A `SelfTest` of a product with a matrix, whose arrays `scaled_matmul` describes."""

    num_groups: int
    bytes_per_group: int
    out_features: int
    number_format: pallas_kernels.NumberFormat
    has_zeros: bool
    dtype: str  # of activations

    def why_kernels_differ(
        self, target: pallas_kernels.Target, *, implementation: str | None = None
    ) -> str | None:
        """Compares a product for each size of `_NUM_ROWS`.

        Products that plain XLA computes anyway are left out. See `SelfTest.why_kernels_differ`.
        """
        matrix = self._random_matrix()
        for num_rows in _NUM_ROWS:
            x = self._random_rows(num_rows)
            body = implementation or pallas_kernels.scaled_matmul_body(
                *(x, *matrix), number_format=self.number_format, target=target
            )
            if body == "xla":
                continue
            got_np, expected_np = (
                np.asarray(self._multiply(x, matrix, chosen)) for chosen in (body, "xla")
            )
            difference = relative_error(got_np, expected_np)
            if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
                return (
                    f"the product of {num_rows} rows with {self.number_format} in groups of "
                    f"{self.bytes_per_group} bytes differs from XLA's by {difference:.3g} of its "
                    f"norm, more than {MAX_RELATIVE_ERROR}"
                )
        return None

    def _random_matrix(self) -> tuple[jax.Array | None, ...]:
        rng = np.random.default_rng(0)
        shape = (self.num_groups, self.bytes_per_group, self.out_features)
        numbers_np = rng.integers(0, 256, shape, np.uint8)
        if self.number_format == "e4m3":
            numbers_np &= 0xBF  # without the largest numbers and NaN
        if self.number_format == "int8":
            numbers_np = numbers_np.view(np.int8)
        scales_np = rng.uniform(0.5, 2, (shape[0], shape[2])).astype(np.float32)
        zeros_np = rng.integers(0, 16, scales_np.shape, np.uint8) if self.has_zeros else None
        arrays = jax.device_put((numbers_np, scales_np))
        return *arrays, None if zeros_np is None else jax.device_put(zeros_np)

    def _random_rows(self, num_rows: int) -> jax.Array:
        numbers_per_byte = 2 if has_pairs(self.number_format) else 1
        in_features = self.num_groups * self.bytes_per_group * numbers_per_byte
        drawn_np = np.random.default_rng(num_rows).standard_normal((num_rows, in_features))
        return jax.device_put(drawn_np.astype(jnp.dtype(self.dtype)))

    def _multiply(
        self, x: jax.Array, matrix: tuple[jax.Array | None, ...], implementation: str
    ) -> jax.Array:  # f32[num_rows, out_features]
        @jax.jit
        def run(x: jax.Array, matrix: tuple[jax.Array | None, ...]) -> jax.Array:
            return pallas_kernels.scaled_matmul(
                *(x, *matrix), number_format=self.number_format, implementation=implementation
            )

        return run(x, matrix)


def scaled_products_of(module: LoadedModule) -> frozenset[CheckedScaledProduct]:
    """Returns the different products of one device with quantized matrices, or with its parts.

    Large matrices are cut.
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
        if isinstance(value, ScaledKernel) and value.numbers.ndim == 4 and value.num_panels == 1
    ]
    return frozenset(
        CheckedScaledProduct(
            min(num_groups, _MAX_GROUPS),
            num_bytes,
            _cut_outputs(out_features),
            matrix.number_format,
            matrix.zeros is not None,
            dtype,
        )
        for matrix, (_, num_groups, num_bytes, out_features) in matrices
        for dtype in dtypes
    )


def _cut_outputs(out_features: int) -> int:
    """A smaller number of outputs, for which a CTA of the kernel has as many columns."""
    if out_features <= _MAX_OUTPUTS:
        return out_features
    return _MAX_OUTPUTS - 128 + out_features % 128
