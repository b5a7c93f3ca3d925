"""Reference body of `gated_delta_step`: one request after the other."""

import math

import jax
import jax.numpy as jnp
from jax import lax

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
    shape = (*k.shape[1:], v.shape[2])
    decay = jnp.exp(log_decay.astype(jnp.float32))
    decay = jnp.broadcast_to(decay.reshape(*decay.shape[:2], -1), k.shape)
    q, k, v, beta = (x.astype(jnp.float32) for x in (q, k, v, beta))
    first, size = states.first_number, math.prod(shape)

    def run_request(
        req: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        out, numbers = carry
        slot = numbers[states.row, states.read_blocks[req]].reshape(-1)
        state = slot[first : first + size].reshape(shape).astype(jnp.float32)
        state = jnp.where(states.starts_from_zero[req], 0, state)
        state = decay[req][..., None] * state
        remembered = (k[req][..., None] * state).sum(axis=1)
        change = beta[req][:, None] * (v[req] - remembered)
        state = state + k[req][..., None] * change[:, None]
        result = (q[req][..., None] * state).sum(axis=1)
        old = numbers.at[states.row, states.write_blocks[req]].get(mode="clip")
        new = old.reshape(-1).at[first : first + size].set(state.reshape(-1).astype(states.dtype))
        numbers = numbers.at[states.row, states.write_blocks[req]].set(
            new.reshape(old.shape), mode="drop"
        )
        return out.at[req].set(result), numbers

    out = jnp.zeros(v.shape, jnp.float32)
    out, numbers = lax.fori_loop(0, q.shape[0], run_request, (out, states.numbers))
    return states.with_numbers(numbers).pages, out
