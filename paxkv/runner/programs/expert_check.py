"""Before anything is served: does the device's own product of experts give what plain XLA gives?"""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models import LoadedModel

# With more than two tiles of rows, without rows, and with one row. Their matrices may be large, so
# there are no more experts than these.
_NUM_EXPERTS = 3
# Rows of no expert, as padding has them.
_NUM_UNROUTED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedProduct:
    """A product of a layer with experts: f[rows, in_features] times each row's own matrix."""

    in_features: int
    out_features: int
    dtype: str


def products_of(model: LoadedModel) -> frozenset[CheckedProduct]:
    """The different products of all layers with experts."""
    kernels = (
        param
        for name, param in zip(model.param_names, model.params, strict=True)
        if name in model.weight_rules and model.weight_rules[name].layout == "experts"
    )
    return frozenset(CheckedProduct(*param.shape[1:], param.dtype.name) for param in kernels)


def multiply_and_compare(
    products: Iterable[CheckedProduct],
    target: pallas_kernels.Target,
    *,
    implementation: str | None = None,
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Computes every product in tiles of every size that `target` may get.

    Products that plain XLA computes anyway are left out.

    Yields:
        What was computed; f32[num_rows, out_features] of `implementation`, and of XLA.
    """
    for product in sorted(products, key=dataclasses.astuple):
        bodies = {
            tile_rows: implementation or _preferred_body(product, tile_rows, target)
            for tile_rows in pallas_kernels.tile_row_choices(target)
        }
        own = {tile_rows: body for tile_rows, body in bodies.items() if body != "xla"}
        kernel = _random_kernel(product) if own else None
        for tile_rows, body in own.items():
            rows, expert_ids = _random_rows(product, tile_rows)
            got_np, expected_np = (
                np.asarray(_multiply(rows, expert_ids, kernel, tile_rows, chosen), np.float32)
                for chosen in (body, "xla")
            )
            what = f"experts of {product.in_features} x {product.out_features}"
            yield f"{what}, tiles of {tile_rows}", got_np, expected_np


def _preferred_body(product: CheckedProduct, tile_rows: int, target: pallas_kernels.Target) -> str:
    dtype = jnp.dtype(product.dtype)
    tiles = jax.ShapeDtypeStruct((_NUM_EXPERTS,), jnp.int32)
    return pallas_kernels.grouped_matmul_body(
        jax.ShapeDtypeStruct((_NUM_EXPERTS * tile_rows, product.in_features), dtype),
        jax.ShapeDtypeStruct((_NUM_EXPERTS, product.in_features, product.out_features), dtype),
        *(tiles, tiles),
        target=target,
    )


def _random_kernel(
    product: CheckedProduct,
) -> jax.Array:  # f[_NUM_EXPERTS, in_features, out_features]
    """Drawn on the device, where it is fast; products with `_random_rows` are near 1."""
    shape = (_NUM_EXPERTS, product.in_features, product.out_features)
    drawn = jax.random.normal(jax.random.key(0), shape, product.dtype)
    return drawn * jnp.asarray(product.in_features**-0.5, drawn.dtype)


def _random_rows(
    product: CheckedProduct, tile_rows: int
) -> tuple[jax.Array, jax.Array]:  # f[num_rows, in_features], i32[num_rows]
    """Rows, and the expert of each."""
    rng = np.random.default_rng(tile_rows)
    sizes = (2 * tile_rows + 1, 0, 1, _NUM_UNROUTED)
    expert_ids_np = rng.permutation(np.repeat(np.arange(_NUM_EXPERTS + 1, dtype=np.int32), sizes))
    rows_np = rng.standard_normal((len(expert_ids_np), product.in_features), np.float32)
    return jnp.asarray(rows_np, product.dtype), jnp.asarray(expert_ids_np)


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
            expert_ids, num_groups=_NUM_EXPERTS, tile_rows=tile_rows
        )
        y = pallas_kernels.grouped_matmul(
            *(rows[tiles.rows], kernel, tiles.groups, tiles.sizes), implementation=implementation
        )
        return y.at[tiles.places].get(mode="fill", fill_value=0)

    return run(rows, expert_ids, kernel)
