"""Named example inputs of `ssd_scan`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_case import RaggedCase


@dataclass(frozen=True, slots=True, kw_only=True)
class SSDScanCase(RaggedCase):
    """The sizes of one example."""

    num_heads: int = 4
    num_groups: int = 2
    head_dim: int = 3
    state_size: int = 8


CASES: tuple[SSDScanCase, ...] = (
    SSDScanCase(name="one_token", counts=(1,)),
    SSDScanCase(name="decodes", counts=(1, 1, 1, 0), num_padding=1),
    SSDScanCase(name="ragged", counts=(2, 0, 7, 1), num_padding=3),
    SSDScanCase(name="one_group", counts=(5, 1), num_groups=1),
    SSDScanCase(name="a_group_per_head", counts=(1, 1), num_groups=4),
    SSDScanCase(name="only_padding", counts=(0, 0), num_padding=4),
    # Chunks that begin and end within a request, few tokens, and no tokens.
    SSDScanCase(
        name="chunks",
        counts=(70, 0, 1, 9, 140),
        num_padding=3,
        first_positions=(0, 5, 63, 60, 30),
    ),
    SSDScanCase(name="bfloat16", counts=(4, 1), dtype="bfloat16"),
)


def build_inputs(case: SSDScanCase, seed: int = 0) -> tuple[jax.Array, ...]:
    """The positional arguments of `ssd_scan`."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(case.counts) + case.num_padding
    x_np = rng.standard_normal((num_tokens, case.num_heads, case.head_dim))
    b_np, c_np = rng.standard_normal((2, num_tokens, case.num_groups, case.state_size))
    log_decay_np = -rng.exponential(0.3, (num_tokens, case.num_heads))
    state_dims = (len(case.counts), case.num_heads, case.head_dim, case.state_size)
    starts_np = np.concatenate([[0], np.cumsum(case.counts)])
    dtype = jnp.dtype(case.dtype)
    # `jnp.asarray` would compile a program for each dtype and shape.
    return (
        *(jax.device_put(x.astype(dtype)) for x in (x_np, b_np, c_np, log_decay_np)),
        jax.device_put(rng.standard_normal(state_dims).astype(np.float32)),
        jax.device_put(starts_np.astype(np.int32)),
    )
