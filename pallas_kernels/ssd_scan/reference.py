"""Reference body of `ssd_scan`: one token after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_tokens


def ssd_scan_reference(
    x: jax.Array,  # f[num_tokens, num_heads, head_dim]
    b: jax.Array,  # f[num_tokens, num_groups, state_size]
    c: jax.Array,  # f[num_tokens, num_groups, state_size]
    log_decay: jax.Array,  # f[num_tokens, num_heads]
    states: jax.Array,  # f32[num_reqs, num_heads, head_dim, state_size]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    positions: jax.Array | None = None,  # i32[num_tokens]
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.ssd_scan`."""
    heads_per_group = x.shape[1] // b.shape[1]
    b, c = (jnp.repeat(array, heads_per_group, axis=1) for array in (b, c))
    tokens = tuple(array.astype(jnp.float32) for array in (x, b, c, log_decay))
    states = states.astype(jnp.float32)
    return scan_tokens(
        _step, states, tokens, query_start_loc, jnp.zeros(x.shape, jnp.float32), state_ends
    )


def _step(
    state: jax.Array,  # f32[num_heads, head_dim, state_size]
    x: jax.Array,  # f32[num_heads, head_dim]
    b: jax.Array,  # f32[num_heads, state_size]
    c: jax.Array,  # f32[num_heads, state_size]
    log_decay: jax.Array,  # f32[num_heads]
) -> tuple[jax.Array, jax.Array]:
    state = jnp.exp(log_decay)[:, None, None] * state + x[..., None] * b[:, None]
    return state, (state * c[:, None]).sum(axis=2)
