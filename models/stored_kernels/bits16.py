"""`Bits16Kernel`: the bits of 16-bit floats, in an array of integers."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models.forward.kernel_settings import ExpertSplit, KernelSettings
from models.stored_kernels.stored_kernel import StoredKernel, UseKernel
from models.weight_rule import SplitAxis, split_spec
from pallas_kernels import GroupTiles


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Bits16Kernel(StoredKernel):
    """Implements `StoredKernel` for stacks. The floats have x's dtype.

    XLA:CPU would convert a whole stack of 16-bit floats for every product with one of its matrices.
    """

    bits: jax.Array  # u16[num_experts, in_features, out_features]

    @classmethod
    def of(cls, values: jax.Array, dtype: jnp.dtype) -> "Bits16Kernel":
        """Stores floats as integers of `dtype`."""
        return cls(jax.lax.bitcast_convert_type(values, dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def product_dtype(self) -> jnp.dtype:
        return self.bits.dtype

    def specs(self, axes: Sequence[SplitAxis | None]) -> tuple[PartitionSpec, ...]:
        return (split_spec(axes),)

    def multiply_groups(
        self,
        x: jax.Array,  # f[num_tiles * tile_rows, in_features]
        tiles: GroupTiles,
        settings: KernelSettings,
        use: UseKernel,
        *,
        split: ExpertSplit,
    ) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
        return use(lambda x, k: settings.grouped_matmul(x, k.bits, tiles, split=split), x)
