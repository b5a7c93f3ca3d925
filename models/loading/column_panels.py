"""Lays the kernels of products out so that one core multiplies few rows with them in less time."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.weight_rule import Layout

# Where a huge page may begin: then all panels can lie in huge pages
# (`models/platforms/huge_pages.py`).
_ALIGNMENT_BYTES = 2 * 2**20
# In a program of one row XLA:CPU makes a loop of its own of each panel, which is 0.02 s to compile.
MAX_PANELS = 64

Params = list[jax.Array | tuple[jax.Array, ...]]


def split_columns(
    params: Params,
    layouts: Sequence[Layout],  # one for each of `params`
    *,
    width: int,
) -> None:
    """Replaces float32 matrices [in, out] in `params` by panels [in, width] of their columns.

    The last panel has the columns that are left. Kernels of fewer than two panels stay as they are,
    and panels of a kernel with more than `MAX_PANELS` are wider by a whole factor.

    The rows of a wide kernel are far apart, often by a power of two: what a product reads of a few
    columns then falls on few places of the first cache, and every row is a page of its own. A panel
    is one piece of memory. XLA's own products, MLP of one layer, JAX 0.10.2, one core with AVX-512,
    panels of 512 columns, time over that of whole kernels: hidden 1,024 0.79 with 16 rows, 0.76
    with 32, 0.74 with 64, 0.95 with 256; hidden 512 0.9, 0.83, 0.93 and 0.95. A head of 1,024 by
    32,768 with its argmax 0.44 with 64 rows, of 512 by 16,384 0.7. One row gains nothing, and an
    engine on one core takes 1.1 to 1.2 of the time to start. `Linear` takes both.

    One is replaced at a time, so that there is never a second copy of the model.
    """
    for param_idx, layout in enumerate(layouts):
        param = params[param_idx]
        is_matrix = layout == "matrix" and param.dtype == jnp.float32
        if is_matrix and param.shape[1] >= 2 * width:
            params[param_idx] = _panels_of(param, width * _factor(param.shape[1], width))


def _factor(out_features: int, width: int) -> int:
    return -(-out_features // (width * MAX_PANELS))


def _panels_of(kernel: jax.Array, width: int) -> tuple[jax.Array, ...]:
    # On a CPU, the one device that has panels, neither end copies: this reads the kernel's own
    # memory, and panels are pieces of what is written here.
    kernel_np = np.asarray(kernel)
    numbers_np = _empty_aligned(kernel_np.size)
    panels = []
    for start in range(0, kernel_np.shape[1], width):
        columns_np = kernel_np[:, start : start + width]
        panel_np = numbers_np[kernel_np.shape[0] * start :][: columns_np.size]
        panel_np = panel_np.reshape(columns_np.shape)
        panel_np[:] = columns_np
        panels.append(jax.device_put(panel_np))
    return tuple(panels)


def _empty_aligned(num_numbers: int) -> np.ndarray:  # f32[num_numbers]
    spare = _ALIGNMENT_BYTES // 4
    numbers_np = np.empty(num_numbers + spare, np.float32)
    start = -numbers_np.ctypes.data % _ALIGNMENT_BYTES // 4
    return numbers_np[start : start + num_numbers]
