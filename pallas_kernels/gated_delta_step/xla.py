"""Plain-JAX body of `gated_delta_step`: a gather, one step of all requests, and a scatter."""

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.xla import gated_delta_rule_xla
from pallas_kernels.paged_states import PagedStates


def gated_delta_step_xla(
    states: PagedStates,
    q: jax.Array,  # f[num_reqs, num_heads, k_dim]
    k: jax.Array,  # f[num_reqs, num_heads, k_dim]
    v: jax.Array,  # f[num_reqs, num_heads, v_dim]
    log_decay: jax.Array,  # f[num_reqs, num_heads] or f[num_reqs, num_heads, k_dim]
    beta: jax.Array,  # f[num_reqs, num_heads]
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_step`."""
    before = states.read((*k.shape[1:], v.shape[2]))
    starts = jnp.arange(states.num_reqs + 1, dtype=jnp.int32)
    out, after = gated_delta_rule_xla(
        q, k, v, log_decay, beta, before, starts, has_one_token_each=True
    )
    return states.write(after), out
