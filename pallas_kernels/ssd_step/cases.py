"""Named example inputs of `ssd_step`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_state_case import PagedStateCase
from pallas_kernels.paged_states import PagedStates


@dataclass(frozen=True, slots=True, kw_only=True)
class SSDStepCase(PagedStateCase):
    """The sizes of one example."""

    num_heads: int = 4
    num_groups: int = 2
    head_dim: int = 32
    state_size: int = 32
    dtype: str = "float32"  # of everything except states

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.state_size


CASES: tuple[SSDStepCase, ...] = (
    SSDStepCase(name="one_request", rows="w", num_heads=2),
    SSDStepCase(name="rows_of_all_kinds", rows="w-z."),
    # CTAs have 64 of the 128 lines of a head. The second page begins at line 96.
    SSDStepCase(name="pieces_are_cut", rows="wz", num_heads=2, head_dim=128, page_lines=96),
    SSDStepCase(name="wide_lines", rows="w", num_groups=4, state_size=256, page_lines=48),
    SSDStepCase(name="one_page", rows="w.z", page_lines=144, lines_before=16, num_groups=1),
    SSDStepCase(name="halves", rows="w-z", pages_dtype="bfloat16", dtype="bfloat16"),
    SSDStepCase(name="bfloat16_states", rows="w-", pages_dtype="bfloat16", state_dtype="bfloat16"),
    SSDStepCase(name="runs_of_4_lines", rows="w-", head_dim=8, state_size=64, page_lines=20),
    SSDStepCase(name="lines_of_odd_size", rows="w-", head_dim=3, state_size=6, page_lines=5),
)


def build_inputs(case: SSDStepCase, seed: int = 0) -> tuple[jax.Array | PagedStates, ...]:
    """The positional arguments of `ssd_step`."""
    rng = np.random.default_rng(seed)
    num_reqs = len(case.rows)
    x_np = rng.standard_normal((num_reqs, case.num_heads, case.head_dim))
    b_np, c_np = rng.standard_normal((2, num_reqs, case.num_groups, case.state_size))
    log_decay_np = -rng.exponential(0.3, (num_reqs, case.num_heads))
    tokens = (x_np, b_np, c_np, log_decay_np)
    states = case.build_states(rng)
    return states, *(jax.device_put(array.astype(jnp.dtype(case.dtype))) for array in tokens)
