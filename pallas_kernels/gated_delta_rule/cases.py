"""Named example inputs of `gated_delta_rule`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_case import RaggedCase


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaRuleCase(RaggedCase):
    """The sizes of one example."""

    num_heads: int = 2
    k_dim: int = 8
    v_dim: int = 6
    has_decay_per_row: bool = False


CASES: tuple[GatedDeltaRuleCase, ...] = (
    GatedDeltaRuleCase(name="one_token", counts=(1,)),
    GatedDeltaRuleCase(name="decodes", counts=(1, 1, 1, 0), num_padding=1),
    GatedDeltaRuleCase(name="ragged", counts=(2, 0, 7, 1), num_padding=3),
    GatedDeltaRuleCase(name="decay_per_row", counts=(5, 1), has_decay_per_row=True),
    GatedDeltaRuleCase(name="decodes_per_row", counts=(1, 1), has_decay_per_row=True),
    GatedDeltaRuleCase(name="only_padding", counts=(0, 0), num_padding=4),
    # Chunks that begin and end within a request, few tokens, and no tokens.
    GatedDeltaRuleCase(
        name="chunks",
        counts=(70, 0, 1, 9, 140),
        num_padding=3,
        first_positions=(0, 5, 63, 60, 30),
    ),
    GatedDeltaRuleCase(
        name="chunks_per_row",
        counts=(70, 0, 1, 140),
        num_padding=3,
        first_positions=(0, 5, 63, 30),
        has_decay_per_row=True,
    ),
    GatedDeltaRuleCase(name="bfloat16", counts=(4, 1), dtype="bfloat16"),
)


def build_inputs(case: GatedDeltaRuleCase, seed: int = 0) -> tuple[jax.Array, ...]:
    """The positional arguments of `gated_delta_rule`, with keys of length 1."""
    rng = np.random.default_rng(seed)
    dims = (sum(case.counts) + case.num_padding, case.num_heads)
    q_np, k_np = rng.standard_normal((2, *dims, case.k_dim))
    k_np /= np.linalg.norm(k_np, axis=-1, keepdims=True)
    v_np = rng.standard_normal((*dims, case.v_dim))
    decay_dims = (*dims, case.k_dim) if case.has_decay_per_row else dims
    log_decay_np = -rng.exponential(0.3, decay_dims)
    beta_np = rng.uniform(0, 1, dims)
    states_np = rng.standard_normal((len(case.counts), case.num_heads, case.k_dim, case.v_dim))
    starts_np = np.concatenate([[0], np.cumsum(case.counts)])
    dtype = jnp.dtype(case.dtype)
    # `jnp.asarray` would compile a program for each dtype and shape.
    return (
        *(jax.device_put(x.astype(dtype)) for x in (q_np, k_np, v_np, log_decay_np, beta_np)),
        jax.device_put(states_np.astype(np.float32)),
        jax.device_put(starts_np.astype(np.int32)),
    )
