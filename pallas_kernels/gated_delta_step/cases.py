"""Named example inputs of `gated_delta_step`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_state_case import PagedStateCase
from pallas_kernels.paged_states import PagedStates


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaStepCase(PagedStateCase):
    """The sizes of one example."""

    num_heads: int = 2
    k_dim: int = 32
    v_dim: int = 32
    has_decay_per_row: bool = False
    dtype: str = "float32"  # of everything except states

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.k_dim, self.v_dim


CASES: tuple[GatedDeltaStepCase, ...] = (
    # A page holds half of a head.
    GatedDeltaStepCase(name="one_request", rows="w"),
    GatedDeltaStepCase(name="rows_of_all_kinds", rows="w-z.w"),
    GatedDeltaStepCase(name="no_row_is_written", rows="..-"),
    GatedDeltaStepCase(name="decay_per_row", rows="wz", has_decay_per_row=True, v_dim=64),
    # The second page begins within the first head, at line 48 of 64.
    GatedDeltaStepCase(name="heads_are_cut", rows="ww", k_dim=64, page_lines=48),
    GatedDeltaStepCase(name="heads_share_a_page", rows="wz", num_heads=3, page_lines=64),
    GatedDeltaStepCase(name="one_page", rows="w.z", page_lines=96, lines_before=16),
    GatedDeltaStepCase(name="halves", rows="w-z", pages_dtype="bfloat16", dtype="bfloat16"),
    GatedDeltaStepCase(
        name="bfloat16_states", rows="w-z", pages_dtype="bfloat16", state_dtype="bfloat16"
    ),
    GatedDeltaStepCase(name="runs_of_4_lines", rows="wz", page_lines=12, has_decay_per_row=True),
    GatedDeltaStepCase(name="lines_of_odd_size", rows="w-", k_dim=8, v_dim=6, page_lines=3),
)


def build_inputs(case: GatedDeltaStepCase, seed: int = 0) -> tuple[jax.Array | PagedStates, ...]:
    """The positional arguments of `gated_delta_step`, with keys of length 1."""
    rng = np.random.default_rng(seed)
    dims = (len(case.rows), case.num_heads)
    q_np, k_np = rng.standard_normal((2, *dims, case.k_dim))
    k_np /= np.linalg.norm(k_np, axis=-1, keepdims=True)
    v_np = rng.standard_normal((*dims, case.v_dim))
    decay_dims = (*dims, case.k_dim) if case.has_decay_per_row else dims
    log_decay_np = -rng.exponential(0.3, decay_dims)
    beta_np = rng.uniform(0, 1, dims)
    tokens = (q_np, k_np, v_np, log_decay_np, beta_np)
    states = case.build_states(rng)
    return states, *(jax.device_put(x.astype(jnp.dtype(case.dtype))) for x in tokens)
