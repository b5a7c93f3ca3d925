"""`KernelEncoder`: chooses how each kernel of a model is stored."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from models.errors import ModelError
from models.platforms import Platform
from models.platforms.base import TiedHead
from models.stored_kernels.bits16 import Bits16Kernel
from models.stored_kernels.column_panels import PanelKernel
from models.stored_kernels.rounded_int8 import RoundedInt8Kernel
from models.stored_kernels.scaled import RoundedFormat, ScaledKernel, fitting_group_size
from models.stored_kernels.use_kernel import KernelValue
from models.weight_rule import Layout

# "auto" is the dtype of the model's other numbers.
ProductDtype = Literal["auto", "bfloat16", "int8"]
# - none: floats, also of checkpoints whose weights are quantized
# - checkpoint: the numbers of a checkpoint whose weights are quantized
# - int8, int4, fp8: integers or 8-bit floats with scales of groups
Quantization = Literal["none", "checkpoint", "int8", "int4", "fp8"]
GROUP_SIZES = (32, 64, 128)
_ROUNDED_FORMATS: dict[Quantization, RoundedFormat] = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "e4m3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEncoder:
    """Replaces arrays of kernels by the form in which the platform multiplies them.

    Embeddings keep their form, with one exception: an embedding with the layout `turned_table`,
    which is also the vocabulary head, may be quantized.

    Args:
        product_dtype: The dtype of matrices of `Linear` layers. Activations are rounded to it when
            they are multiplied with such a matrix. Sums are not rounded to it.
        panel_width: Columns of the panels of float32 matrices, if these are not rounded; None
            leaves them whole.
        quantization: What matrices and experts are quantized to. Activations are not rounded. With
            "checkpoint", the loader makes the kernels that are quantized there (`keep_integers`).
        group_size: Inputs that share a scale. Kernels whose number of inputs it does not divide get
            the largest size that divides both.
        num_devices: Of the mesh that kernels are split over.
    """

    platform: Platform
    product_dtype: ProductDtype = "auto"
    panel_width: int | None = None
    quantization: Quantization = "none"
    group_size: int = 128
    num_devices: int = 1

    def __post_init__(self) -> None:
        if self.quantization != "none" and self.product_dtype != "auto":
            raise ModelError(
                f"quantization is {self.quantization!r} and product_dtype is "
                f"{self.product_dtype!r}; kernels have one encoding. Set one of the two."
            )
        if self.group_size not in GROUP_SIZES:
            raise ModelError(
                f"quantization_group_size is {self.group_size}; expected one of "
                f"{', '.join(map(str, GROUP_SIZES))}."
            )

    def tied_head(self, dtype: str) -> TiedHead:
        """How an embedding of `dtype` that is also the vocabulary head is stored."""
        return self.platform.tied_head(
            dtype,
            quantizes=self.quantization in _ROUNDED_FORMATS,
            changes_kernels=self.panel_width is not None or self.product_dtype != "auto",
        )

    @property
    def scaled_panel_width(self) -> int | None:
        """Columns of the panels of quantized kernels; None keeps all columns together."""
        # Panels could not be split over devices.
        return self.platform.scaled_panel_width if self.num_devices == 1 else None

    def group_size_of(
        self, num_inputs: int, layout: Layout, *, is_router: bool, splits_inputs: bool = False
    ) -> int | None:
        """Inputs that share a scale in a parameter; None if `encode` does not quantize it.

        Args:
            num_inputs: Of a matrix or an expert, on all devices.
            is_router: As in `encode`.
            splits_inputs: As in `encode`.
        """
        has_products = layout in ("matrix", "experts", "turned_table")
        if not has_products or self.quantization not in _ROUNDED_FORMATS or is_router:
            return None
        own_inputs = num_inputs // (self.num_devices if splits_inputs else 1)
        return fitting_group_size(own_inputs, self.group_size)

    def encode(
        self,
        values: jax.Array,
        layout: Layout,
        *,
        is_router: bool,
        splits_inputs: bool = False,
    ) -> KernelValue:
        """Returns the stored form of one parameter.

        Args:
            is_router: Whether it belongs to a router, whose numbers are never rounded.
            splits_inputs: Whether each device has some of the inputs of a matrix or an expert. All
                inputs of a group are on one device.
        """
        group_size = None
        if values.ndim > 1:
            sizes = {"is_router": is_router, "splits_inputs": splits_inputs}
            group_size = self.group_size_of(values.shape[-2], layout, **sizes)
        if group_size is not None:
            return ScaledKernel.quantize(
                values,
                number_format=_ROUNDED_FORMATS[self.quantization],
                group_size=group_size,
                panel_width=self.scaled_panel_width,
            )
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
