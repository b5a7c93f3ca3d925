"""Plain-JAX body of `causal_conv1d`: computes all tokens at once, one kernel place at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import request_of_token


def causal_conv1d_xla(
    x: jax.Array,  # f[num_tokens, num_channels]
    window: jax.Array,  # f[num_reqs, kernel_size - 1, num_channels]
    weight: jax.Array,  # f[kernel_size, num_channels]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
) -> tuple[jax.Array, jax.Array]:
    """See `api.causal_conv1d`."""
    x, window, weight = (array.astype(jnp.float32) for array in (x, window, weight))
    num_tokens, num_kept = x.shape[0], window.shape[1]
    starts = query_start_loc[:-1]
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    req = request_of_token(query_start_loc, num_tokens)
    offset = token_idx - starts[req]  # within the request's tokens of this step
    y = x * weight[num_kept]
    for back in range(1, num_kept + 1):
        before = jnp.where(
            (offset >= back)[:, None],
            x[jnp.maximum(token_idx - back, 0)],
            window[req, jnp.clip(num_kept + offset - back, 0, num_kept - 1)],
        )
        y += before * weight[num_kept - back]
    ends = query_start_loc[1:] if state_ends is None else state_ends
    return y, _last_inputs(x, window, starts, ends)


def _last_inputs(
    x: jax.Array,  # f32[num_tokens, num_channels]
    window: jax.Array,  # f32[num_reqs, kernel_size - 1, num_channels]
    starts: jax.Array,  # i32[num_reqs]
    ends: jax.Array,  # i32[num_reqs]
) -> jax.Array:  # f32[num_reqs, kernel_size - 1, num_channels]
    num_kept = window.shape[1]
    starts, ends = starts[:, None], ends[:, None]
    # Places of the new window, as offsets within the request's tokens of this step. Those below 0
    # are in the old window: with 1 token and 3 places, offsets -2 and -1 are its last two.
    offset = ends - starts - num_kept + jnp.arange(num_kept, dtype=jnp.int32)
    new = x[jnp.clip(starts + offset, 0, x.shape[0] - 1)]
    kept = jnp.take_along_axis(window, jnp.clip(num_kept + offset, 0, num_kept - 1)[..., None], 1)
    return jnp.where((offset >= 0)[..., None], new, kept)
