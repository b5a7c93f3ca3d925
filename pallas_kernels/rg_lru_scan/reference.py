"""Reference body of `rg_lru_scan`: one token after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_tokens


def rg_lru_scan_reference(
    x: jax.Array,  # f[num_tokens, width]
    log_decay: jax.Array,  # f[num_tokens, width]
    states: jax.Array,  # f32[num_reqs, width]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.rg_lru_scan`."""

    def step(
        state: jax.Array,  # f32[width]
        x: jax.Array,  # f32[width]
        log_decay: jax.Array,  # f32[width]
    ) -> tuple[jax.Array, jax.Array]:
        state = jnp.exp(log_decay) * state + x
        return state, state

    tokens = tuple(array.astype(jnp.float32) for array in (x, log_decay))
    states = states.astype(jnp.float32)
    return scan_tokens(
        step, states, tokens, query_start_loc, jnp.zeros(x.shape, jnp.float32), state_ends
    )
