"""`PanelKernel`: stores neighboring columns of a kernel together, for few rows on one core."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models.forward.kernel_settings import KernelSettings
from models.layers.product import dot_float32
from models.stored_kernels.stored_kernel import StoredKernel, UseKernel
from models.weight_rule import SplitAxis

# Where a huge page may begin: then all panels can lie in huge pages
# (`models/platforms/huge_pages.py`).
_ALIGNMENT_BYTES = 2 * 2**20
# In a program of one row, XLA:CPU compiles a separate loop for each panel.
MAX_PANELS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PanelKernel(StoredKernel):
    """Implements `StoredKernel` for one float32 matrix: panels [in, width] of its columns.

    The last panel has the remaining columns. If a kernel would have more than `MAX_PANELS`, its
    panels are wider by a whole factor.

    The rows of a wide kernel are far apart, often by a power of two. A product that reads a few
    columns of each row then uses few sets of the first cache, and one page of memory per row. A
    panel is contiguous. Measured in docs/design/cpu.md.
    """

    panels: tuple[jax.Array, ...]  # f32[in_features, width]

    @classmethod
    def of(
        cls,
        values: jax.Array,  # f32[in_features, out_features]
        width: int,
    ) -> "PanelKernel | None":
        """Cuts a kernel into panels; None if it has fewer than two."""
        if values.shape[1] < 2 * width:
            return None
        return cls(_panels_of(values, width * -(-values.shape[1] // (width * MAX_PANELS))))

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.panels[0]), sum(panel.shape[1] for panel in self.panels)

    @property
    def product_dtype(self) -> jnp.dtype:
        return self.panels[0].dtype

    def specs(self, axes: Sequence[SplitAxis | None]) -> tuple[PartitionSpec, ...]:
        """Whole on every device: one core alone uses panels, and columns may not divide evenly."""
        return (PartitionSpec(),) * len(self.panels)

    def multiply(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        settings: KernelSettings,
        use: UseKernel,
    ) -> jax.Array:  # f32[num_rows, out_features]
        # Outside of the function, XLA can fuse the joining with what follows.
        sums = use(lambda x, kernel: [dot_float32(x, panel) for panel in kernel.panels], x)
        return jnp.concatenate(sums, axis=1)


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
