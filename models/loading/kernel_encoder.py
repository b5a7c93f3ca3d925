"""`KernelEncoder`: chooses how each kernel of a model is stored."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from models.platforms import Platform
from models.stored_kernels.bits16 import Bits16Kernel
from models.stored_kernels.column_panels import PanelKernel
from models.stored_kernels.rounded_int8 import RoundedInt8Kernel
from models.stored_kernels.use_kernel import KernelValue
from models.weight_rule import Layout

# "auto" is the dtype of the model's other numbers.
ProductDtype = Literal["auto", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEncoder:
    """Replaces arrays of kernels by the form in which the platform multiplies them.

    Embeddings keep their form, and so does a head that reads the embedding.

    Args:
        product_dtype: What matrices of `Linear` layers are rounded to. Activations are rounded
            where they meet such a matrix, and sums are as wide as ever.
        panel_width: Columns of the panels of float32 matrices, if these are not rounded; None
            leaves them whole.
    """

    platform: Platform
    product_dtype: ProductDtype
    panel_width: int | None

    @property
    def changes_matrices(self) -> bool:
        """Whether matrices of `Linear` layers may have another form than in the checkpoint."""
        return self.panel_width is not None or self.product_dtype != "auto"

    def encode(self, values: jax.Array, layout: Layout, *, is_router: bool) -> KernelValue:
        """Returns the stored form of one parameter.

        Args:
            is_router: Whether it belongs to a router, whose numbers are never rounded.
        """
        if layout == "experts":
            return self._encode_experts(values)
        if layout != "matrix":
            return values
        if self.product_dtype == "auto":
            return self._in_panels(values)
        if is_router:
            return values
        if self.product_dtype == "int8":
            return RoundedInt8Kernel.of(values)
        return values.astype(self.product_dtype)

    def _in_panels(self, values: jax.Array) -> KernelValue:
        if self.panel_width is None or values.dtype != jnp.float32:
            return values
        panels = PanelKernel.of(values, self.panel_width)
        return values if panels is None else panels

    def _encode_experts(self, values: jax.Array) -> KernelValue:
        dtype = jnp.dtype(self.platform.expert_dtype(values.dtype.name))
        return values if dtype == values.dtype else Bits16Kernel.of(values, dtype)
