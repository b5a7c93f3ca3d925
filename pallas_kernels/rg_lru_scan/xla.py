"""Plain-JAX body of `rg_lru_scan`: one step per request, or a loop over tokens."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_tokens, step_rows


def rg_lru_scan_xla(
    x: jax.Array,  # f[num_tokens, width]
    log_decay: jax.Array,  # f[num_tokens, width]
    states: jax.Array,  # f32[num_reqs, width]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.rg_lru_scan`."""
    tokens = (x.astype(jnp.float32), jnp.exp(log_decay.astype(jnp.float32)))
    states = states.astype(jnp.float32)
    if has_one_token_each:
        return step_rows(_step, states, tokens)
    return scan_tokens(
        _step, states, tokens, query_start_loc, jnp.zeros(x.shape, jnp.float32), state_ends
    )


def _step(
    state: jax.Array,  # f32[..., width]
    x: jax.Array,  # f32[..., width]
    decay: jax.Array,  # f32[..., width]
) -> tuple[jax.Array, jax.Array]:
    state = decay * state + x
    return state, state
