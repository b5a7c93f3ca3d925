"""Plain-JAX body of `ssd_scan`: one step per request, or a scan over chunks or tokens."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_chunks, scan_tokens, step_rows, sums_between

# Full float32 precision on every device, because a state accumulates the errors of all tokens.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
# Tokens of a chunk (docs/design/kernels.md), and the fewest that a chunk may have. Both numbers are
# guesses.
_CHUNK, _MIN_CHUNK = 64, 8


def ssd_scan_xla(
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
    out = jnp.zeros_like(grouped_x)
    if has_one_token_each:
        out, states = step_rows(_step, states, tokens)
    elif positions is None:
        out, states = scan_tokens(_step, states, tokens, query_start_loc, out, state_ends)
    else:
        log_decay = log_decay.astype(jnp.float32)
        out, states = scan_chunks(
            lambda state, x, b, c, decay, log_decay: _chunk_step(state, x, b, c, log_decay),
            lambda state, x, b, c, decay, log_decay: _step(state, x, b, c, decay),
            states,
            (*tokens, log_decay),
            query_start_loc,
            positions,
            out,
            state_ends,
            chunk_size=_CHUNK,
            min_chunk=_MIN_CHUNK,
        )
    return out.reshape(x.shape), states.reshape(shape)


def _step(
    state: jax.Array,  # f32[..., num_groups, rows, state_size]
    x: jax.Array,  # f32[..., num_groups, rows]
    b: jax.Array,  # f32[..., num_groups, state_size]
    c: jax.Array,  # f32[..., num_groups, state_size]
    decay: jax.Array,  # f32[..., num_groups, rows]
) -> tuple[jax.Array, jax.Array]:
    # Of the state before the step, so that neither result waits for an array of the other one.
    seen = decay * _dot("...grn,...gn->...gr", state, c)
    out = seen + x * _dot("...gn,...gn->...g", b, c)[..., None]
    return decay[..., None] * state + x[..., None] * b[..., None, :], out


def _chunk_step(
    state: jax.Array,  # f32[num_groups, rows, state_size]
    x: jax.Array,  # f32[size, num_groups, rows]
    b: jax.Array,  # f32[size, num_groups, state_size]
    c: jax.Array,  # f32[size, num_groups, state_size]
    log_decay: jax.Array,  # f32[size, num_heads]
) -> tuple[jax.Array, jax.Array]:
    """Source: arXiv:2405.21060, section 6: what tokens see of each other, and of the state."""
    size, num_groups, rows = x.shape
    shape = (num_groups, log_decay.shape[1] // num_groups, -1)
    between = jnp.exp(sums_between(log_decay)).reshape(*shape[:2], size, size)
    total = jnp.cumsum(log_decay, axis=0)
    # From the state before the chunk to each token, and from each token to the end.
    since = jnp.exp(total).T.reshape(*shape[:2], size)
    until = between[:, :, -1]
    heads = x.reshape(size, num_groups, shape[1], rows // shape[1])
    seen = _dot("tgn,sgn->gts", c, b)
    out = _dot("ghts,sghp->tghp", seen[:, None] * between, heads)
    of_state = state.reshape(num_groups, shape[1], rows // shape[1], -1)
    out += _dot("tgn,ghpn,ght->tghp", c, of_state, since)
    added = _dot("sghp,sgn,ghs->ghpn", heads, b, until)
    of_state = since[:, :, -1, None, None] * of_state + added
    return of_state.reshape(state.shape), out.reshape(x.shape)
