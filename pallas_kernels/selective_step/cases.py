"""Named example inputs of `selective_step`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_state_case import PagedStateCase
from pallas_kernels.paged_states import PagedStates


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveStepCase(PagedStateCase):
    """The sizes of one example. `line_size`, the unit of `page_lines`, divides `width`."""

    num_groups: int = 1
    state_size: int = 4
    width: int = 512
    line_size: int = 128
    dtype: str = "float32"  # of everything except states and decays

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_groups, self.state_size, self.width


CASES: tuple[SelectiveStepCase, ...] = (
    SelectiveStepCase(name="one_request", rows="w"),
    SelectiveStepCase(name="rows_of_all_kinds", rows="w-z.", num_groups=2, width=256, page_lines=8),
    SelectiveStepCase(name="no_row_is_written", rows=".", width=256),
    # A state has four lines of 512 numbers. A page holds one and a half of them.
    SelectiveStepCase(name="lines_are_cut", rows="w-", page_lines=6),
    # 256 does not divide a page or the width, so each CTA has 128 channels.
    SelectiveStepCase(name="odd_pages", rows="wz", page_lines=3),
    SelectiveStepCase(name="odd_width", rows="w-", width=384, num_groups=2),
    SelectiveStepCase(name="one_page", rows="w.z", page_lines=23, lines_before=6),
    SelectiveStepCase(name="halves", rows="w-z", pages_dtype="bfloat16", dtype="bfloat16"),
    SelectiveStepCase(
        name="bfloat16_states", rows="w-", pages_dtype="bfloat16", state_dtype="bfloat16"
    ),
    SelectiveStepCase(name="many_numbers", rows="w", state_size=64, width=256),
    SelectiveStepCase(name="lines_of_odd_size", rows="w-", width=6, line_size=6, page_lines=3),
)


def build_inputs(case: SelectiveStepCase, seed: int = 0) -> tuple[jax.Array | PagedStates, ...]:
    """The positional arguments of `selective_step`."""
    rng = np.random.default_rng(seed)
    dims = (len(case.rows), case.num_groups)
    x_np = rng.standard_normal((*dims, case.width))
    dt_np = rng.exponential(0.3, x_np.shape)
    b_np, c_np = rng.standard_normal((2, *dims, case.state_size))
    a = jax.device_put(-rng.uniform(0.5, 4.0, case.state_shape).astype(np.float32))
    x, dt, b, c = (
        jax.device_put(array.astype(jnp.dtype(case.dtype))) for array in (x_np, dt_np, b_np, c_np)
    )
    return case.build_states(rng), x, dt, a, b, c
