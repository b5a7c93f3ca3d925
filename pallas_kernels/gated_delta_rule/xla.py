"""Plain-JAX body of `gated_delta_rule`: one step per request, or a scan over chunks or tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_chunks, scan_tokens, step_rows, sums_between

# Full float32 precision on every device, because a state accumulates the errors of all tokens.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
# Tokens of a chunk (docs/design/kernels.md), and the fewest that a chunk may have. Both numbers are
# guesses.
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
    state_ends: jax.Array | None = None,  # i32[num_reqs]
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
    if positions is None:
        return scan_tokens(_step, states, tokens, query_start_loc, out, state_ends)
    return scan_chunks(
        lambda state, q, k, v, decay, beta, log_decay: _chunk_step(state, q, k, v, log_decay, beta),
        lambda state, q, k, v, decay, beta, log_decay: _step(state, q, k, v, decay, beta),
        states,
        (*tokens, log_decay.astype(jnp.float32).reshape(decay.shape)),
        query_start_loc,
        positions,
        out,
        state_ends,
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
    log_decay: jax.Array,  # f32[size, num_heads, k_dim or 1]
    beta: jax.Array,  # f32[size, num_heads]
) -> tuple[jax.Array, jax.Array]:
    """Finds all changes of the state at once, as the solution of a triangular system.

    The change of token t is `beta (v - k^T S)`, where S is the decayed state before it: the state
    before the chunk, plus `k change^T` of the tokens before t, all decayed up to t.

    Source: arXiv:2412.06464, section 3.3; with a decay per row, arXiv:2510.26692, section 4.
    """
    decayed_products = _products_by_head if log_decay.shape[2] == 1 else _products_by_row
    q, k, v, log_decay = (array.swapaxes(0, 1) for array in (q, k, v, log_decay))
    beta = beta.T[:, :, None]
    (seen, alike), since, until = decayed_products(jnp.stack([q, k]), k, log_decay)
    wanted = beta * (v - _dot("htk,hkv->htv", since * k, state))
    change = _solve(beta * jnp.tril(alike, -1), wanted)
    out = _dot("htk,hkv->htv", since * q, state) + _dot("hts,hsv->htv", seen, change)
    state = since[:, -1, :, None] * state + _dot("hsk,hsv->hkv", until * k, change)
    return state, out.swapaxes(0, 1)


class _Decayed(NamedTuple):
    """Products of rows and keys of a chunk, and its decays."""

    # Row t times the key of token s, decayed from s to t: [..., t, s]. Zero if s is after t.
    products: jax.Array  # f32[..., num_heads, size, size]
    since: jax.Array  # f32[num_heads, size, k_dim or 1], from the state before the chunk
    until: jax.Array  # f32[num_heads, size, k_dim or 1], to the end of the chunk


def _products_by_head(
    rows: jax.Array,  # f32[..., num_heads, size, k_dim]
    k: jax.Array,  # f32[num_heads, size, k_dim]
    log_decay: jax.Array,  # f32[num_heads, size, 1]
) -> _Decayed:
    between = jnp.exp(sums_between(log_decay[:, :, 0].T))
    since = jnp.exp(jnp.cumsum(log_decay, axis=1))
    products = _dot("...htk,hsk->...hts", rows, k) * between
    return _Decayed(products, since, between[:, -1, :, None])


def _products_by_row(
    rows: jax.Array,  # f32[..., num_heads, size, k_dim]
    k: jax.Array,  # f32[num_heads, size, k_dim]
    log_decay: jax.Array,  # f32[num_heads, size, k_dim]
) -> _Decayed:
    """Joins neighboring spans of 1, 2, 4, ... tokens. The size is a power of two.

    The decay between tokens of two spans is that of the key to the end of its span, times that of
    the row since the start of its span. Both are at most 1. The quotient of two decays since the
    start of the chunk could overflow.
    """
    num_heads, size, k_dim = k.shape
    products = (rows * k).sum(axis=-1)[..., None, None]  # [..., num_heads, span, t, s]
    since = jnp.exp(log_decay)[:, :, None]  # [num_heads, span, t, k_dim]
    until = jnp.ones_like(since)
    for half in (1 << power for power in range(size.bit_length() - 1)):
        pair = (size // (2 * half), 2, half)  # first and second span
        of_rows, of_keys = (x.reshape(*x.shape[:-2], *pair, k_dim) for x in (rows, k))
        since, until = (x.reshape(num_heads, *pair, k_dim) for x in (since, until))
        products = products.reshape(*products.shape[:-3], *pair, half)
        later = _dot(
            "...ik,...jk->...ij",
            of_rows[..., 1, :, :] * since[:, :, 1],
            of_keys[:, :, 0] * until[:, :, 0],
        )
        first, second = products[..., 0, :, :], products[..., 1, :, :]
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        products = jnp.concatenate([upper, jnp.concatenate([later, second], axis=-1)], axis=-2)
        of_first, of_second = since[:, :, :1, -1:], since[:, :, 1:, -1:]
        since = jnp.concatenate([since[:, :, :1], since[:, :, 1:] * of_first], axis=3)[:, :, 0]
        until = jnp.concatenate([until[:, :, :1] * of_second, until[:, :, 1:]], axis=3)[:, :, 0]
    return _Decayed(products[..., 0, :, :], since[:, 0], until[:, 0])


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
