"""Reference body of `selective_scan`: one token after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_tokens


def selective_scan_reference(
    x: jax.Array,  # f[num_tokens, num_groups, width]
    dt: jax.Array,  # f[num_tokens, num_groups, width]
    a: jax.Array,  # f[num_groups, state_size, width]
    b: jax.Array,  # f[num_tokens, num_groups, state_size]
    c: jax.Array,  # f[num_tokens, num_groups, state_size]
    states: jax.Array,  # f32[num_reqs, num_groups, state_size, width]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.selective_scan`."""
    decays = a.astype(jnp.float32)

    def step(
        state: jax.Array,  # f32[num_groups, state_size, width]
        x: jax.Array,  # f32[num_groups, width]
        dt: jax.Array,  # f32[num_groups, width]
        b: jax.Array,  # f32[num_groups, state_size]
        c: jax.Array,  # f32[num_groups, state_size]
    ) -> tuple[jax.Array, jax.Array]:
        added = b[:, :, None] * (dt * x)[:, None]
        state = jnp.exp(dt[:, None] * decays) * state + added
        return state, (c[:, :, None] * state).sum(axis=1)

    tokens = tuple(array.astype(jnp.float32) for array in (x, dt, b, c))
    states = states.astype(jnp.float32)
    return scan_tokens(
        step, states, tokens, query_start_loc, jnp.zeros(x.shape, jnp.float32), state_ends
    )
