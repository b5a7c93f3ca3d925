"""Named example inputs of `selective_scan`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_case import RaggedCase


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScanCase(RaggedCase):
    """The sizes of one example."""

    num_groups: int = 1
    width: int = 12
    state_size: int = 8


CASES: tuple[SelectiveScanCase, ...] = (
    SelectiveScanCase(name="one_token", counts=(1,)),
    SelectiveScanCase(name="decodes", counts=(1, 1, 1, 0), num_padding=1),
    SelectiveScanCase(name="ragged", counts=(2, 0, 7, 1), num_padding=3),
    SelectiveScanCase(name="two_groups", counts=(5, 1), num_groups=2),
    SelectiveScanCase(name="decodes_of_two_groups", counts=(1, 1), num_groups=2),
    # The channels of a token are three lines of 128.
    SelectiveScanCase(name="decodes_in_lines", counts=(1, 0, 1), width=384),
    SelectiveScanCase(name="only_padding", counts=(0, 0), num_padding=4),
    SelectiveScanCase(name="bfloat16", counts=(4, 1), dtype="bfloat16"),
)


def build_inputs(case: SelectiveScanCase, seed: int = 0) -> tuple[jax.Array, ...]:
    """The positional arguments of `selective_scan`."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(case.counts) + case.num_padding
    x_np = rng.standard_normal((num_tokens, case.num_groups, case.width))
    dt_np = rng.exponential(0.3, x_np.shape)
    b_np, c_np = rng.standard_normal((2, num_tokens, case.num_groups, case.state_size))
    state_dims = (case.num_groups, case.state_size, case.width)
    a_np = -rng.uniform(0.5, 4.0, state_dims).astype(np.float32)
    states_np = rng.standard_normal((len(case.counts), *state_dims)).astype(np.float32)
    starts_np = np.concatenate([[0], np.cumsum(case.counts)]).astype(np.int32)
    # `jnp.asarray` would compile a program for each dtype and shape.
    x, dt, b, c = (
        jax.device_put(array.astype(jnp.dtype(case.dtype))) for array in (x_np, dt_np, b_np, c_np)
    )
    a, states, starts = map(jax.device_put, (a_np, states_np, starts_np))
    return x, dt, a, b, c, states, starts
