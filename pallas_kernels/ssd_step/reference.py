"""Reference body of `ssd_step`: one request after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_states import PagedStates


def ssd_step_reference(
    states: PagedStates,
    x: jax.Array,  # f[num_reqs, num_heads, head_dim]
    b: jax.Array,  # f[num_reqs, num_groups, state_size]
    c: jax.Array,  # f[num_reqs, num_groups, state_size]
    log_decay: jax.Array,  # f[num_reqs, num_heads]
) -> tuple[jax.Array, jax.Array]:
    """See `api.ssd_step`."""
    heads_per_group = x.shape[1] // b.shape[1]
    b, c = (jnp.repeat(array, heads_per_group, axis=1) for array in (b, c))
    x, b, c, log_decay = (array.astype(jnp.float32) for array in (x, b, c, log_decay))

    def step(req: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        decay = jnp.exp(log_decay[req])[:, None, None]
        state = decay * state + x[req][..., None] * b[req][:, None]
        return state, (state * c[req][:, None]).sum(axis=2)

    shape = (*x.shape[1:], b.shape[2])
    return states.advance_one_by_one(step, shape, jnp.zeros(x.shape, jnp.float32))
