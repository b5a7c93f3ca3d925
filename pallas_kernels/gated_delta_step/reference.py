"""Reference body of `gated_delta_step`: one request after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_states import PagedStates


def gated_delta_step_reference(
    states: PagedStates,
    q: jax.Array,  # f[num_reqs, num_heads, k_dim]
    k: jax.Array,  # f[num_reqs, num_heads, k_dim]
    v: jax.Array,  # f[num_reqs, num_heads, v_dim]
    log_decay: jax.Array,  # f[num_reqs, num_heads] or f[num_reqs, num_heads, k_dim]
    beta: jax.Array,  # f[num_reqs, num_heads]
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_step`."""
    decay = jnp.exp(log_decay.astype(jnp.float32))
    decay = jnp.broadcast_to(decay.reshape(*decay.shape[:2], -1), k.shape)
    q, k, v, beta = (x.astype(jnp.float32) for x in (q, k, v, beta))

    def step(req: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = decay[req][..., None] * state
        remembered = (k[req][..., None] * state).sum(axis=1)
        change = beta[req][:, None] * (v[req] - remembered)
        state = state + k[req][..., None] * change[:, None]
        return state, (q[req][..., None] * state).sum(axis=1)

    shape = (*k.shape[1:], v.shape[2])
    return states.advance_one_by_one(step, shape, jnp.zeros(v.shape, jnp.float32))
