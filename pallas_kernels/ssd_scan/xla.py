"""Plain-JAX body of `ssd_scan`: one step per request, or a scan over tokens."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_tokens, step_rows

# Full float32 precision on every device, because a state accumulates the errors of all tokens.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def ssd_scan_xla(
    x: jax.Array,  # f[num_tokens, num_heads, head_dim]
    b: jax.Array,  # f[num_tokens, num_groups, state_size]
    c: jax.Array,  # f[num_tokens, num_groups, state_size]
    log_decay: jax.Array,  # f[num_tokens, num_heads]
    states: jax.Array,  # f32[num_reqs, num_heads, head_dim, state_size]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.ssd_scan`."""
    num_groups = b.shape[1]
    # The heads of a group form one matrix, so that each group needs one matrix-vector product.
    grouped_x = x.astype(jnp.float32).reshape(x.shape[0], num_groups, -1)
    decay = jnp.repeat(jnp.exp(log_decay.astype(jnp.float32)), x.shape[2], axis=1)
    tokens = (
        grouped_x,
        *(array.astype(jnp.float32) for array in (b, c)),
        decay.reshape(grouped_x.shape),
    )
    shape = states.shape
    states = states.astype(jnp.float32).reshape(shape[0], num_groups, -1, shape[3])
    if has_one_token_each:
        out, states = step_rows(_step, states, tokens)
    else:
        out, states = scan_tokens(_step, states, tokens, query_start_loc, jnp.zeros_like(grouped_x))
    return out.reshape(x.shape), states.reshape(shape)


def _step(
    state: jax.Array,  # f32[..., num_groups, rows, state_size]
    x: jax.Array,  # f32[..., num_groups, rows]
    b: jax.Array,  # f32[..., num_groups, state_size]
    c: jax.Array,  # f32[..., num_groups, state_size]
    decay: jax.Array,  # f32[..., num_groups, rows]
) -> tuple[jax.Array, jax.Array]:
    state = decay[..., None] * state + x[..., None] * b[..., None, :]
    return state, _dot("...grn,...gn->...gr", state, c)
