"""`PanelKernel`: columns of a kernel lie together, so that few rows take less time on one core."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models.layers.product import dot_float32
from models.stored_kernels.stored_kernel import StoredKernel, UseKernel
from models.weight_rule import SplitAxis

# Where a huge page may begin: then all panels can lie in huge pages
# (`models/platforms/huge_pages.py`).
_ALIGNMENT_BYTES = 2 * 2**20
# In a program of one row XLA:CPU makes a loop of its own of each panel, which is 0.02 s to compile.
MAX_PANELS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PanelKernel(StoredKernel):
    """Implements `StoredKernel` for one float32 matrix: panels [in, width] of its columns.

    The last panel has the columns that are left. Panels of a kernel with more than `MAX_PANELS` are
    wider by a whole factor.

    The rows of a wide kernel are far apart, often by a power of two: what a product reads of a few
    columns then falls on few places of the first cache, and every row is a page of its own. A panel
    is one piece of memory. XLA's own products, MLP of one layer, JAX 0.10.2, one core with AVX-512,
    panels of 512 columns, time over that of whole kernels: hidden 1,024 0.79 with 16 rows, 0.76
    with 32, 0.74 with 64, 0.95 with 256; hidden 512 0.9, 0.83, 0.93 and 0.95. A head of 1,024 by
    32,768 with its argmax 0.44 with 64 rows, of 512 by 16,384 0.7. One row gains nothing, and an
    engine on one core takes 1.1 to 1.2 of the time to start.
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
