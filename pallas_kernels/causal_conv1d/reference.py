"""Reference body of `causal_conv1d`: one token after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import request_of_token


def causal_conv1d_reference(
    x: jax.Array,  # f[num_tokens, num_channels]
    window: jax.Array,  # f[num_reqs, kernel_size - 1, num_channels]
    weight: jax.Array,  # f[kernel_size, num_channels]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
) -> tuple[jax.Array, jax.Array]:
    """See `api.causal_conv1d`."""
    x, window, weight = (array.astype(jnp.float32) for array in (x, window, weight))
    num_tokens = x.shape[0]
    state_ends = query_start_loc[1:] if state_ends is None else state_ends

    def turn(
        windows: tuple[jax.Array, jax.Array], token: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        token_idx, req, own = token
        current, kept = windows
        inputs = jnp.concatenate([current[req], own[None]])
        is_used = token_idx < query_start_loc[-1]
        current = current.at[req].set(jnp.where(is_used, inputs[1:], current[req]))
        is_kept = is_used & (token_idx < state_ends[req])
        kept = kept.at[req].set(jnp.where(is_kept, inputs[1:], kept[req]))
        return (current, kept), (weight * inputs).sum(axis=0)

    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    tokens = (token_idx, request_of_token(query_start_loc, num_tokens), x)
    (_, window), y = jax.lax.scan(turn, (window, window), tokens)
    return y, window
