"""Named example inputs of `rg_lru_scan`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_case import RaggedCase


@dataclass(frozen=True, slots=True, kw_only=True)
class RGLRUScanCase(RaggedCase):
    """The sizes of one example."""

    width: int = 24


CASES: tuple[RGLRUScanCase, ...] = (
    RGLRUScanCase(name="one_token", counts=(1,)),
    RGLRUScanCase(name="decodes", counts=(1, 1, 1, 0), num_padding=1),
    RGLRUScanCase(name="ragged", counts=(2, 0, 7, 1), num_padding=3),
    RGLRUScanCase(name="only_padding", counts=(0, 0), num_padding=4),
    RGLRUScanCase(name="bfloat16", counts=(4, 1), dtype="bfloat16"),
)


def build_inputs(case: RGLRUScanCase, seed: int = 0) -> tuple[jax.Array, ...]:
    """The positional arguments of `rg_lru_scan`."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(case.counts) + case.num_padding
    x_np = rng.standard_normal((num_tokens, case.width))
    log_decay_np = -rng.exponential(0.3, x_np.shape)
    states_np = rng.standard_normal((len(case.counts), case.width)).astype(np.float32)
    starts_np = np.concatenate([[0], np.cumsum(case.counts)]).astype(np.int32)
    # `jnp.asarray` would compile a program for each dtype and shape.
    tokens = (array.astype(jnp.dtype(case.dtype)) for array in (x_np, log_decay_np))
    return tuple(map(jax.device_put, (*tokens, states_np, starts_np)))
