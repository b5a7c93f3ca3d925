"""`StoredKernel`: what an encoding of kernels defines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models.errors import ModelError
from models.forward.kernel_settings import ExpertSplit, KernelSettings
from models.weight_rule import SplitAxis
from pallas_kernels import GroupTiles

# `use(function, operand)` returns `function(operand, kernel)`, where `kernel` is the one whose
# arrays are multiplied. In a loop over layers, this is the kernel of the layer that the loop has
# reached, and the program contains the function once per layer. So the function should be small.
UseKernel = Callable[[Callable[..., Any], jax.Array], Any]


class StoredKernel(ABC):
    """The arrays of one matrix [in, out], or of a stack of matrices [num_experts, in, out].

    Each class is a pytree. Kernels that differ only in the numbers of their arrays share a program.
    A method therefore takes sizes from `self`, and arrays from the kernel that `use` passes.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix or the stack, however it is stored."""

    @property
    @abstractmethod
    def product_dtype(self) -> jnp.dtype:
        """The dtype of the numbers that are multiplied."""

    @abstractmethod
    def specs(self, axes: Sequence[SplitAxis | None]) -> tuple[PartitionSpec, ...]:
        """How a mesh splits each array, in the order of the pytree's leaves.

        Args:
            axes: Of the matrix or the stack, as in `WeightRule`.
        """

    def on_mesh(self, axes: Sequence[SplitAxis | None]) -> "StoredKernel":
        """The same kernel for products over a mesh, which splits its arrays as `specs` describes.

        Args:
            axes: As in `specs`.
        """
        return self

    def multiply(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        settings: KernelSettings,
        use: UseKernel,
    ) -> jax.Array:  # f32[num_rows, out_features]
        """The product of x with one matrix."""
        raise ModelError(f"a {type(self).__name__} holds a stack of matrices; expected one matrix.")

    def multiply_one(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        matrix_idx: jax.Array | int,
        settings: KernelSettings,
    ) -> jax.Array:  # f32[num_rows, out_features]
        """The product of x with one matrix of a stack.

        Only encodings whose matrices the loader puts into stacks define it (`layer_stack.py`).
        """
        raise ModelError(
            f"a {type(self).__name__} cannot multiply with one matrix of a stack; expected a "
            "quantized kernel."
        )

    def columns(
        self,
        column_ids: jax.Array,  # i32[num_columns], in [0, out_features)
        dtype: jnp.dtype,
    ) -> jax.Array:  # dtype[in_features, num_columns]
        """Some columns of one matrix, as an embedding that is also the vocabulary head reads them.

        Only encodings that `KernelEncoder` may choose for such an embedding define it.
        """
        raise ModelError(f"a {type(self).__name__} cannot be an embedding; expected floats.")

    def multiply_groups(
        self,
        x: jax.Array,  # f[num_tiles * tile_rows, in_features]
        tiles: GroupTiles,
        settings: KernelSettings,
        use: UseKernel,
        *,
        split: ExpertSplit,
    ) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
        """The products of tiles of rows with the matrices of their experts.

        Args:
            split: What a mesh splits.
        """
        raise ModelError(f"a {type(self).__name__} holds one matrix; expected a stack.")
