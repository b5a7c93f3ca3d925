"""Reference body of `gated_delta_rule`: one token after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_tokens


def gated_delta_rule_reference(
    q: jax.Array,  # f[num_tokens, num_heads, k_dim]
    k: jax.Array,  # f[num_tokens, num_heads, k_dim]
    v: jax.Array,  # f[num_tokens, num_heads, v_dim]
    log_decay: jax.Array,  # f[num_tokens, num_heads] or f[num_tokens, num_heads, k_dim]
    beta: jax.Array,  # f[num_tokens, num_heads]
    states: jax.Array,  # f32[num_reqs, num_heads, k_dim, v_dim]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    positions: jax.Array | None = None,  # i32[num_tokens]
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_rule`."""
    decay = jnp.exp(log_decay.astype(jnp.float32))
    decay = jnp.broadcast_to(decay.reshape(*decay.shape[:2], -1), k.shape)
    tokens = tuple(x.astype(jnp.float32) for x in (q, k, v, decay, beta))
    states = states.astype(jnp.float32)
    return scan_tokens(
        _step, states, tokens, query_start_loc, jnp.zeros(v.shape, jnp.float32), state_ends
    )


def _step(
    state: jax.Array,  # f32[num_heads, k_dim, v_dim]
    q: jax.Array,  # f32[num_heads, k_dim]
    k: jax.Array,  # f32[num_heads, k_dim]
    v: jax.Array,  # f32[num_heads, v_dim]
    decay: jax.Array,  # f32[num_heads, k_dim]
    beta: jax.Array,  # f32[num_heads]
) -> tuple[jax.Array, jax.Array]:
    state = decay[..., None] * state
    remembered = (k[..., None] * state).sum(axis=1)
    state = state + k[..., None] * (beta[:, None] * (v - remembered))[:, None]
    return state, (q[..., None] * state).sum(axis=1)
