"""Plain-JAX body of `gated_delta_rule`: one step per request, or a scan over chunks or tokens."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_chunks, scan_tokens, step_rows, sums_between

# Full float32 precision on every device, because a state accumulates the errors of all tokens.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
# Tokens of a chunk (docs/design/kernels.md), and the fewest tokens that are computed as one. Both
# numbers are guesses.
_CHUNK, _MIN_CHUNK = 64, 8
_BLOCK = 16  # rows of a chunk's system that are solved together


def gated_delta_rule_xla(
    q: jax.Array,  # f[num_tokens, num_heads, k_dim]
    k: jax.Array,  # f[num_tokens, num_heads, k_dim]
    v: jax.Array,  # f[num_tokens, num_heads, v_dim]
    log_decay: jax.Array,  # f[num_tokens, num_heads] or f[num_tokens, num_heads, k_dim]
    beta: jax.Array,  # f[num_tokens, num_heads]
    states: jax.Array,  # f32[num_reqs, num_heads, k_dim, v_dim]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    positions: jax.Array | None = None,  # i32[num_tokens]
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_rule`."""
    decay = jnp.exp(log_decay.astype(jnp.float32))
    decay = decay.reshape(*decay.shape[:2], -1)
    tokens = tuple(x.astype(jnp.float32) for x in (q, k, v, decay, beta))
    states = states.astype(jnp.float32)
    if has_one_token_each:
        return step_rows(_step, states, tokens)
    out = jnp.zeros(v.shape, jnp.float32)
    # Chunks need one decay per head.
    if positions is None or decay.shape[2] > 1:
        return scan_tokens(_step, states, tokens, query_start_loc, out)
    return scan_chunks(
        lambda state, q, k, v, decay, beta, log_decay: _chunk_step(state, q, k, v, log_decay, beta),
        lambda state, q, k, v, decay, beta, log_decay: _step(state, q, k, v, decay, beta),
        states,
        (*tokens, log_decay.astype(jnp.float32).reshape(decay.shape[:2])),
        query_start_loc,
        positions,
        out,
        chunk_size=_CHUNK,
        min_chunk=_MIN_CHUNK,
    )


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


def _chunk_step(
    state: jax.Array,  # f32[num_heads, k_dim, v_dim]
    q: jax.Array,  # f32[size, num_heads, k_dim]
    k: jax.Array,  # f32[size, num_heads, k_dim]
    v: jax.Array,  # f32[size, num_heads, v_dim]
    log_decay: jax.Array,  # f32[size, num_heads]
    beta: jax.Array,  # f32[size, num_heads]
) -> tuple[jax.Array, jax.Array]:
    """Finds all changes of the state at once, as the solution of a triangular system.

    The change of token t is `beta (v - k^T S)`, where S is the decayed state before it: the state
    before the chunk, plus `k change^T` of the tokens before t, all decayed up to t.

    Source: arXiv:2412.06464, section 3.3.
    """
    between = jnp.exp(sums_between(log_decay))  # [num_heads, to, from]
    since = jnp.exp(jnp.cumsum(log_decay, axis=0)).T[:, :, None]  # [num_heads, size, 1]
    q, k, v = (array.swapaxes(0, 1) for array in (q, k, v))
    beta = beta.T[:, :, None]
    alike = jnp.tril(_dot("htk,hsk->hts", k, k) * between, -1)
    wanted = beta * (v - since * _dot("htk,hkv->htv", k, state))
    change = _solve(beta * alike, wanted)
    out = since * _dot("htk,hkv->htv", q, state)
    out += _dot("hts,hsv->htv", _dot("htk,hsk->hts", q, k) * between, change)
    kept = k * between[:, -1, :, None]
    state = since[:, -1:] * state + _dot("hsk,hsv->hkv", kept, change)
    return state, out.swapaxes(0, 1)


def _solve(
    below: jax.Array,  # f32[num_heads, size, size], zero on and above the diagonal
    wanted: jax.Array,  # f32[num_heads, size, v_dim]
) -> jax.Array:  # f32[num_heads, size, v_dim]
    """Solves `(1 + below) x = wanted` by forward substitution.

    The blocks on the diagonal are inverted together, so a chunk of 64 takes 15 steps for rows and 4
    for blocks. On a CPU, JAX's `triangular_solve` of a batch takes 50 times as long. A product of
    powers of `below` would lose all digits if keys are alike.
    """
    num_heads, size, _ = below.shape
    starts = range(0, size, _BLOCK)
    diagonal = jnp.stack(
        [below[:, start : start + _BLOCK, start : start + _BLOCK] for start in starts], axis=1
    )
    one = jnp.eye(_BLOCK, dtype=jnp.float32)

    def add_row(row: jax.Array, inverse: jax.Array) -> jax.Array:
        return inverse.at[:, :, row].set(
            one[row] - _dot("hbj,hbjk->hbk", diagonal[:, :, row], inverse)
        )

    inverse = jnp.broadcast_to(one, (num_heads, size // _BLOCK, _BLOCK, _BLOCK))
    inverse = jax.lax.fori_loop(1, _BLOCK, add_row, inverse)
    found = jnp.zeros_like(wanted[:, :0])
    for block, start in enumerate(starts):
        rows = slice(start, start + _BLOCK)
        rest = wanted[:, rows] - _dot("hts,hsv->htv", below[:, rows, :start], found)
        found = jnp.concatenate([found, _dot("hts,hsv->htv", inverse[:, block], rest)], axis=1)
    return found
