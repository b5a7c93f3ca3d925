"""Named example inputs of `causal_conv1d`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_case import RaggedCase


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalConv1dCase(RaggedCase):
    """The sizes of one example."""

    num_channels: int = 5
    kernel_size: int = 4


CASES: tuple[CausalConv1dCase, ...] = (
    CausalConv1dCase(name="one_token", counts=(1,)),
    CausalConv1dCase(name="decodes", counts=(1, 1, 1), num_channels=33),
    # Requests with fewer new tokens than the window has places, with none, and with more.
    CausalConv1dCase(name="ragged", counts=(2, 0, 7, 1, 3), num_padding=3),
    CausalConv1dCase(name="kernel_of_2", counts=(3, 1), kernel_size=2),
    CausalConv1dCase(name="only_padding", counts=(0, 0), num_padding=4),
    CausalConv1dCase(name="bfloat16", counts=(4, 1), dtype="bfloat16"),
)


def build_inputs(
    case: CausalConv1dCase, seed: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The positional arguments of `causal_conv1d`."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(case.counts) + case.num_padding
    x_np = rng.standard_normal((num_tokens, case.num_channels))
    window_np = rng.standard_normal((len(case.counts), case.kernel_size - 1, case.num_channels))
    weight_np = rng.standard_normal((case.kernel_size, case.num_channels))
    starts_np = np.concatenate([[0], np.cumsum(case.counts)])
    dtype = jnp.dtype(case.dtype)
    # `jnp.asarray` would compile a program for each dtype and shape.
    return (
        jax.device_put(x_np.astype(dtype)),
        jax.device_put(window_np.astype(np.float32)),
        jax.device_put(weight_np.astype(dtype)),
        jax.device_put(starts_np.astype(np.int32)),
    )
