"""Plain-JAX body of `ssd_step`: a gather, one step of all requests, and a scatter."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_states import PagedStates
from pallas_kernels.ssd_scan.xla import ssd_scan_xla


def ssd_step_xla(
    states: PagedStates,
    x: jax.Array,  # f[num_reqs, num_heads, head_dim]
    b: jax.Array,  # f[num_reqs, num_groups, state_size]
    c: jax.Array,  # f[num_reqs, num_groups, state_size]
    log_decay: jax.Array,  # f[num_reqs, num_heads]
) -> tuple[jax.Array, jax.Array]:
    """See `api.ssd_step`."""
    before = states.read((*x.shape[1:], b.shape[2]))
    starts = jnp.arange(states.num_reqs + 1, dtype=jnp.int32)
    out, after = ssd_scan_xla(x, b, c, log_decay, before, starts, has_one_token_each=True)
    return states.write(after), out
