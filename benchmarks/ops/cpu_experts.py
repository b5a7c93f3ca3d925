"""One product of an experts layer on the CPU, in a step that uses few of many experts."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import choose_tile_rows, default_target, grouped_matmul, make_group_tiles

MAX_RELATIVE_ERROR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Rows that go to `num_hit` experts in equal parts."""

    num_rows: int
    num_hit: int
    in_features: int
    out_features: int


FULL = ExpertSizes(num_rows=64, num_hit=8, in_features=512, out_features=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProduct:
    """Rows, their experts, and the matrices of all experts, of which few are hit."""

    x: jax.Array  # f32[num_rows, in_features]
    expert_ids: jax.Array  # i32[num_rows]
    kernel: jax.Array  # f32[num_experts, in_features, out_features]

    @property
    def num_experts(self) -> int:
        return self.kernel.shape[0]


def build_products(sizes: ExpertSizes, all_num_experts: tuple[int, ...]) -> list[ExpertProduct]:
    """The same rows and the same hit matrices, once for each number of experts."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((sizes.num_rows, sizes.in_features), np.float32))
    hit_dims = (sizes.num_hit, sizes.in_features, sizes.out_features)
    hit_np = rng.standard_normal(hit_dims, np.float32)
    chosen_np = rng.permutation(np.arange(sizes.num_rows) % sizes.num_hit)
    products = []
    for num_experts in all_num_experts:
        places_np = np.sort(rng.permutation(num_experts)[: sizes.num_hit])
        kernel_np = rng.standard_normal((num_experts, *hit_dims[1:]), np.float32)
        kernel_np[places_np] = hit_np
        expert_ids = jnp.asarray(places_np[chosen_np], jnp.int32)
        products.append(ExpertProduct(x=x, expert_ids=expert_ids, kernel=jnp.asarray(kernel_np)))
    return products


def expert_call(product: ExpertProduct) -> Callable[[int], jax.Array]:
    """Sorts the rows by expert and multiplies them; f32[num_rows, out_features] in their order."""
    num_experts = product.num_experts
    tile_rows = choose_tile_rows(len(product.x), num_experts, default_target())

    @jax.jit
    def multiply(x: jax.Array, expert_ids: jax.Array, kernel: jax.Array) -> jax.Array:
        tiles = make_group_tiles(expert_ids, num_groups=num_experts, tile_rows=tile_rows)
        return grouped_matmul(x[tiles.rows], kernel, tiles.groups, tiles.sizes)[tiles.places]

    arguments = (product.x, product.expert_ids, product.kernel)
    return lambda data_idx: multiply(*arguments).block_until_ready()


def relative_error(product: ExpertProduct, y: jax.Array) -> float:
    """Largest error against float64, as a share of the largest value."""
    x_np, kernel_np = (np.asarray(array, np.float64) for array in (product.x, product.kernel))
    own = zip(x_np, np.asarray(product.expert_ids), strict=True)
    wanted_np = np.stack([row_np @ kernel_np[expert] for row_np, expert in own])
    return float(np.abs(np.asarray(y) - wanted_np).max() / np.abs(wanted_np).max())
