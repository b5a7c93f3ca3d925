"""`PlainKernel`: floats in one array."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models.forward.kernel_settings import ExpertSplit, KernelSettings
from models.layers.product import at_least_min_rows, dot_float32
from models.stored_kernels.stored_kernel import StoredKernel, UseKernel
from models.weight_rule import SplitAxis, split_spec
from pallas_kernels import GroupTiles


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PlainKernel(StoredKernel):
    """Implements `StoredKernel`.

    A parameter is the array itself (`as_stored_kernel`). One matrix may have fewer bits than x; x
    is then rounded to its dtype.
    """

    values: jax.Array  # f[in_features, out_features] or f[num_experts, in_features, out_features]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def product_dtype(self) -> jnp.dtype:
        return self.values.dtype

    def specs(self, axes: Sequence[SplitAxis | None]) -> tuple[PartitionSpec, ...]:
        return (split_spec(axes),)

    def multiply(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        settings: KernelSettings,
        use: UseKernel,
    ) -> jax.Array:  # f32[num_rows, out_features]
        x_rounded = x
        if x.dtype != self.values.dtype:
            x_rounded = at_least_min_rows(x.astype(self.values.dtype))
        sums = use(lambda x, kernel: dot_float32(x, kernel.values), x_rounded)
        return sums[: x.shape[0]]

    def multiply_groups(
        self,
        x: jax.Array,  # f[num_tiles * tile_rows, in_features]
        tiles: GroupTiles,
        settings: KernelSettings,
        use: UseKernel,
        *,
        split: ExpertSplit,
    ) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
        return use(lambda x, k: settings.grouped_matmul(x, k.values, tiles, split=split), x)
