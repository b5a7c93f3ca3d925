"""Plain-JAX body of `selective_step`: a gather, one step of all requests, and a scatter."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_states import PagedStates
from pallas_kernels.selective_scan.xla import selective_scan_xla


def selective_step_xla(
    states: PagedStates,
    x: jax.Array,  # f[num_reqs, num_groups, width]
    dt: jax.Array,  # f[num_reqs, num_groups, width]
    a: jax.Array,  # f[num_groups, state_size, width]
    b: jax.Array,  # f[num_reqs, num_groups, state_size]
    c: jax.Array,  # f[num_reqs, num_groups, state_size]
) -> tuple[jax.Array, jax.Array]:
    """See `api.selective_step`."""
    before = states.read(a.shape)
    starts = jnp.arange(states.num_reqs + 1, dtype=jnp.int32)
    out, after = selective_scan_xla(x, dt, a, b, c, before, starts, has_one_token_each=True)
    return states.write(after), out
