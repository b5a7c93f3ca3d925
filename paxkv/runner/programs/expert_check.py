"""Before anything is served: does the device's own product of experts give what plain XLA gives?"""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models import LoadedModel

# The check needs a few experts only, whose matrices may be large: one without rows, one with a
# single row, and others with full and part tiles.
_NUM_EXPERTS = 4
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

    Yields:
        What was computed; f32[num_rows, out_features] of `implementation`, and of XLA.
    """
    for product in sorted(products, key=dataclasses.astuple):
        for tile_rows in pallas_kernels.tile_row_choices(target):
            dims = f"{product.in_features} x {product.out_features}"
            inputs = _random_inputs(product, tile_rows)
            got, expected = (
                np.asarray(_multiply(inputs, tile_rows, chosen, target), np.float32)
                for chosen in (implementation, "xla")
            )
            yield f"experts of {dims}, tiles of {tile_rows}", got, expected


def _random_inputs(product: CheckedProduct, tile_rows: int) -> tuple[jax.Array, ...]:
    """Rows, their experts and the matrices; values near 1 after the product."""
    rng = np.random.default_rng(tile_rows)
    sizes = (tile_rows + 1, 0, 1, 2 * tile_rows, _NUM_UNROUTED)
    expert_ids = rng.permutation(np.repeat(np.arange(_NUM_EXPERTS + 1, dtype=np.int32), sizes))
    rows = rng.standard_normal((len(expert_ids), product.in_features), np.float32)
    kernel = rng.standard_normal(
        (_NUM_EXPERTS, product.in_features, product.out_features), np.float32
    )
    dtype = jnp.dtype(product.dtype)
    scale = product.in_features**-0.5
    return jnp.asarray(rows, dtype), jnp.asarray(expert_ids), jnp.asarray(kernel * scale, dtype)


def _multiply(
    inputs: tuple[jax.Array, ...],
    tile_rows: int,
    implementation: str | None,
    target: pallas_kernels.Target,
) -> jax.Array:  # f[num_rows, out_features], zero for rows of no expert
    @jax.jit
    def run(rows: jax.Array, expert_ids: jax.Array, kernel: jax.Array) -> jax.Array:
        tiles = pallas_kernels.make_group_tiles(
            expert_ids, num_groups=_NUM_EXPERTS, tile_rows=tile_rows
        )
        y = pallas_kernels.grouped_matmul(
            *(rows[tiles.rows], kernel, tiles.groups, tiles.sizes),
            implementation=implementation,
            target=target,
        )
        return y.at[tiles.places].get(mode="fill", fill_value=0)

    return run(*inputs)
