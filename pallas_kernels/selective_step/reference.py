"""Reference body of `selective_step`: one request after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_states import PagedStates


def selective_step_reference(
    states: PagedStates,
    x: jax.Array,  # f[num_reqs, num_groups, width]
    dt: jax.Array,  # f[num_reqs, num_groups, width]
    a: jax.Array,  # f[num_groups, state_size, width]
    b: jax.Array,  # f[num_reqs, num_groups, state_size]
    c: jax.Array,  # f[num_reqs, num_groups, state_size]
) -> tuple[jax.Array, jax.Array]:
    """See `api.selective_step`."""
    x, dt, a, b, c = (array.astype(jnp.float32) for array in (x, dt, a, b, c))

    def step(req: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        decay = jnp.exp(dt[req][:, None] * a)
        state = decay * state + b[req][..., None] * (dt[req] * x[req])[:, None]
        return state, (c[req][..., None] * state).sum(axis=1)

    return states.advance_one_by_one(step, a.shape, jnp.zeros(x.shape, jnp.float32))
