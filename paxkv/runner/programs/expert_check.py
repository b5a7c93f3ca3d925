"""`CheckedProduct`: compares the device's kernel for products of experts with plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.cache.self_test import MAX_RELATIVE_ERROR, relative_error
from models.loading.loaded_module import LoadedModule

# One expert gets rows for more than two tiles, one gets no row, and one gets a single row. The
# matrix of an expert may be large, so there are only these three.
NUM_EXPERTS = 3
# Rows that go to no expert, like padding.
_NUM_UNROUTED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedProduct:
    """A `SelfTest` of a product in a layer with experts.

    The product is f[rows, in_features] times the matrix of each row's expert.
    """

    in_features: int
    out_features: int
    dtype: str

    def why_kernels_differ(
        self, target: pallas_kernels.Target, *, implementation: str | None = None
    ) -> str | None:
        """Compares products in tiles of each size that `target` may use.

        Products that plain XLA computes anyway are left out. See `SelfTest.why_kernels_differ`.
        """
        bodies = {
            tile_rows: implementation or _preferred_body(self, tile_rows, target)
            for tile_rows in pallas_kernels.tile_row_choices(target)
        }
        own = {tile_rows: body for tile_rows, body in bodies.items() if body != "xla"}
        kernel = _random_kernel(self) if own else None
        for tile_rows, body in own.items():
            rows, expert_ids = random_rows(tile_rows, self.in_features, self.dtype)
            got_np, expected_np = (
                np.asarray(_multiply(rows, expert_ids, kernel, tile_rows, chosen), np.float32)
                for chosen in (body, "xla")
            )
            difference = relative_error(got_np, expected_np)
            if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
                return (
                    f"the product of experts of {self.in_features} x {self.out_features}, tiles of "
                    f"{tile_rows} differs from XLA's by {difference:.3g} of its norm, more than "
                    f"{MAX_RELATIVE_ERROR}"
                )
        return None


def products_of(model: LoadedModule) -> frozenset[CheckedProduct]:
    """Returns the different products that one device computes, of all layers with experts."""
    kernels = (
        value
        for name, value in model.parameters.items()
        if model.weight_rules[name].layout == "experts"
    )
    # `scaled_check` compares quantized kernels. Other kernels that are no arrays use plain XLA.
    return frozenset(
        CheckedProduct(*kernel.sharding.shard_shape(kernel.shape)[1:], kernel.dtype.name)
        for kernel in kernels
        if isinstance(kernel, jax.Array)
    )


def _preferred_body(product: CheckedProduct, tile_rows: int, target: pallas_kernels.Target) -> str:
    dtype = jnp.dtype(product.dtype)
    tiles = jax.ShapeDtypeStruct((NUM_EXPERTS,), jnp.int32)
    return pallas_kernels.grouped_matmul_body(
        jax.ShapeDtypeStruct((NUM_EXPERTS * tile_rows, product.in_features), dtype),
        jax.ShapeDtypeStruct((NUM_EXPERTS, product.in_features, product.out_features), dtype),
        *(tiles, tiles),
        target=target,
    )


def _random_kernel(
    product: CheckedProduct,
) -> jax.Array:  # f[NUM_EXPERTS, in_features, out_features]
    """Draws the matrices on the device, which is fast. Products with `random_rows` are near 1."""
    shape = (NUM_EXPERTS, product.in_features, product.out_features)
    drawn = jax.random.normal(jax.random.key(0), shape, product.dtype)
    return drawn * jnp.asarray(product.in_features**-0.5, drawn.dtype)


def random_rows(
    tile_rows: int, in_features: int, dtype: str
) -> tuple[jax.Array, jax.Array]:  # f[num_rows, in_features], i32[num_rows]
    """Returns rows, and the expert of each row."""
    rng = np.random.default_rng(tile_rows)
    sizes = (2 * tile_rows + 1, 0, 1, _NUM_UNROUTED)
    expert_ids_np = rng.permutation(np.repeat(np.arange(NUM_EXPERTS + 1, dtype=np.int32), sizes))
    rows_np = rng.standard_normal((len(expert_ids_np), in_features), np.float32)
    return jnp.asarray(rows_np, dtype), jnp.asarray(expert_ids_np)


def _multiply(
    rows: jax.Array,
    expert_ids: jax.Array,
    kernel: jax.Array,
    tile_rows: int,
    implementation: str,
) -> jax.Array:  # f[num_rows, out_features], zero for rows of no expert
    @jax.jit
    def run(rows: jax.Array, expert_ids: jax.Array, kernel: jax.Array) -> jax.Array:
        tiles = pallas_kernels.make_group_tiles(
            expert_ids, num_groups=NUM_EXPERTS, tile_rows=tile_rows
        )
        y = pallas_kernels.grouped_matmul(
            *(rows[tiles.rows], kernel, tiles.groups, tiles.sizes), implementation=implementation
        )
        return y.at[tiles.places].get(mode="fill", fill_value=0)

    return run(rows, expert_ids, kernel)
