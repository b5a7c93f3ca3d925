"""Plain-JAX body of `gated_delta_rule`: one step per request, or a scan over tokens."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_tokens, step_rows

# Full float32 precision on every device, because a state accumulates the errors of all tokens.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def gated_delta_rule_xla(
    q: jax.Array,  # f[num_tokens, num_heads, k_dim]
    k: jax.Array,  # f[num_tokens, num_heads, k_dim]
    v: jax.Array,  # f[num_tokens, num_heads, v_dim]
    log_decay: jax.Array,  # f[num_tokens, num_heads] or f[num_tokens, num_heads, k_dim]
    beta: jax.Array,  # f[num_tokens, num_heads]
    states: jax.Array,  # f32[num_reqs, num_heads, k_dim, v_dim]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_rule`."""
    decay = jnp.exp(log_decay.astype(jnp.float32))
    decay = decay.reshape(*decay.shape[:2], -1)
    tokens = tuple(x.astype(jnp.float32) for x in (q, k, v, decay, beta))
    states = states.astype(jnp.float32)
    if has_one_token_each:
        return step_rows(_step, states, tokens)
    return scan_tokens(_step, states, tokens, query_start_loc, jnp.zeros(v.shape, jnp.float32))


def _step(
    state: jax.Array,  # f32[..., num_heads, k_dim, v_dim]
    q: jax.Array,  # f32[..., num_heads, k_dim]
    k: jax.Array,  # f32[..., num_heads, k_dim]
    v: jax.Array,  # f32[..., num_heads, v_dim]
    decay: jax.Array,  # f32[..., num_heads, k_dim or 1]
    beta: jax.Array,  # f32[..., num_heads]
) -> tuple[jax.Array, jax.Array]:
    # k^T (decay S) is (decay k)^T S, so one pass over the state reads it, and another updates it.
    remembered = _dot("...hk,...hkv->...hv", decay * k, state)
    change = beta[..., None] * (v - remembered)
    state = decay[..., None] * state + k[..., None] * change[..., None, :]
    return state, _dot("...hk,...hkv->...hv", q, state)
