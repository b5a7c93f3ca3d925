"""Lays the kernels of products out so that one core multiplies few rows with them in less time."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Columns of a panel: the first of these that divides a kernel's. No kernel of fewer than twice the
# first is split.
PANEL_WIDTHS = (256, 128, 64)
# Numbers of a kernel that the host turns itself: a program for it is 0.06 s to compile.
_MAX_HOST_TURN = 2**20


def split_columns(
    params: list[jax.Array],
    names: Sequence[str],  # "layers.0.self_attn.q_proj.kernel", one for each of `params`
) -> None:
    """Replaces float32 kernels [in, out] in `params` by [num_panels, in, panel_width].

    The rows of a wide kernel are pages of memory apart. A product, which reads a block of it at a
    time, then waits for the addresses of those pages; a panel is one piece of memory. XLA's own
    products take 0.5 to 0.7 of the time with 16 and 32 rows, and 0.65 to 0.9 with more (a model's
    products in turn, hidden 512, one core with AVX2, JAX 0.10.2). `Linear` takes both.

    One is replaced at a time, so that there is never a second copy of the model.
    """
    for param_idx, name in enumerate(names):
        if name.endswith(".kernel") and params[param_idx].dtype == jnp.float32:
            params[param_idx] = _in_panels(params[param_idx])


def _in_panels(kernel: jax.Array) -> jax.Array:
    in_features, out_features = kernel.shape
    width = next((width for width in PANEL_WIDTHS if out_features % width == 0), None)
    if width is None or out_features < 2 * PANEL_WIDTHS[0]:
        return kernel
    if kernel.size > _MAX_HOST_TURN:
        panels = _turn(kernel, width)  # and no copy of the host's besides
    else:
        # On a CPU, the one device that has panels, this is the kernel's own memory.
        panels_np = np.asarray(kernel).reshape(in_features, -1, width).transpose(1, 0, 2)
        panels = jax.device_put(np.ascontiguousarray(panels_np))
    return panels.block_until_ready()  # or several would be on their way at once


@functools.partial(jax.jit, static_argnames="width")
def _turn(kernel: jax.Array, width: int) -> jax.Array:
    return kernel.reshape(kernel.shape[0], -1, width).transpose(1, 0, 2)
