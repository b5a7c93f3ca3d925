"""Quantizes a large matrix one panel at a time, so that it is never whole in memory as floats."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from models.platforms.huge_pages import empty_in_huge_pages
from models.stored_kernels.scaled import ScaledKernel

# Most numbers of a matrix that is quantized whole, which takes several times its memory as floats.
_MAX_WHOLE_SIZE = 2**22


def needs_parts(weight_np: np.ndarray, panel_width: int | None) -> bool:
    """Whether a weight, stored as in a checkpoint, is a large matrix with several panels."""
    return (
        panel_width is not None
        and weight_np.ndim == 2
        and len(weight_np) > panel_width
        and weight_np.size > _MAX_WHOLE_SIZE
    )


def quantize_in_parts(
    weight_np: np.ndarray,  # f[out_features, in_features]
    quantize: Callable[[np.ndarray], ScaledKernel],
    *,
    panel_width: int,
) -> ScaledKernel:
    """Returns the same kernel as `quantize(weight_np)`.

    Only CPUs have panels. There, each panel is copied into the memory of the result.

    Args:
        quantize: Quantizes some rows of the weight, which are outputs. The numbers of an output
            must not depend on other outputs.
        panel_width: As in `ScaledKernel.pack`.
    """
    num_outputs = len(weight_np)
    width = ScaledKernel.width_of_panels(num_outputs, panel_width)
    num_panels = -(-num_outputs // width)
    arrays_np: list[np.ndarray] = []
    for panel_idx in range(num_panels):
        rows_np = weight_np[panel_idx * width : (panel_idx + 1) * width]
        # All panels have the same shape, so one program quantizes them.
        panel = quantize(np.pad(rows_np, ((0, width - len(rows_np)), (0, 0))))
        leaves, treedef = jax.tree.flatten(panel)
        if not arrays_np:
            arrays_np = [empty_in_huge_pages((num_panels, *x.shape[1:]), x.dtype) for x in leaves]
        for array_np, leaf in zip(arrays_np, leaves, strict=True):
            array_np[panel_idx] = np.asarray(leaf)[0]
    arrays = [jax.device_put(array_np, may_alias=True) for array_np in arrays_np]
    return dataclasses.replace(jax.tree.unflatten(treedef, arrays), out_features=num_outputs)
