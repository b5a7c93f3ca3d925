"""Steps over packed tokens of several requests, for ops that carry a state per request.

Request r has tokens `query_start_loc[r]:query_start_loc[r + 1]`. Tokens at or past the last entry
belong to no request.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

State = TypeVar("State")


def request_of_token(
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    num_tokens: int,
) -> jax.Array:  # i32[num_tokens]
    """The request of each token; the last request for tokens of no request."""
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    req = jnp.searchsorted(query_start_loc[1:], token_idx, side="right").astype(jnp.int32)
    return jnp.minimum(req, query_start_loc.shape[0] - 2)


class _StateRows(NamedTuple):
    """The row from which each token reads the state before it, and the row that it writes.

    Both are the row of its request, except for tokens from `state_ends` on. These tokens write a
    last row, which no request keeps.
    """

    read: jax.Array  # i32[num_tokens]
    write: jax.Array  # i32[num_tokens]

    @classmethod
    def of_tokens(
        cls,
        req_of_token: jax.Array,  # i32[num_tokens]
        num_reqs: int,
        state_ends: jax.Array | None,  # i32[num_reqs]
    ) -> "_StateRows":
        if state_ends is None:
            return cls(req_of_token, req_of_token)
        token_idx = jnp.arange(req_of_token.shape[0], dtype=jnp.int32)
        ends = state_ends[req_of_token]
        # The first token after the end still reads the state that the request keeps.
        return cls(
            read=jnp.where(token_idx <= ends, req_of_token, num_reqs),
            write=jnp.where(token_idx < ends, req_of_token, num_reqs),
        )


def _with_last_row(states: jax.Array, state_ends: jax.Array | None) -> jax.Array:
    return states if state_ends is None else jnp.concatenate([states, states[:1]])


def scan_tokens(
    step: Callable[..., tuple[jax.Array, jax.Array]],
    states: jax.Array,  # f32[num_reqs, ...]
    tokens: tuple[jax.Array, ...],  # f32[num_tokens, ...] each
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    out: jax.Array,  # f32[num_tokens, ...], the results of tokens of no request
    state_ends: jax.Array | None = None,  # i32[num_reqs]
) -> tuple[jax.Array, jax.Array]:
    """Calls `step(state, *token)` for the tokens of requests, one after the other.

    The loops run once per such token, so padding costs nothing.

    Args:
        step: Returns the request's new state, and the result of the token.
        state_ends: The returned state of request r is that before token `state_ends[r]`, in
            `[query_start_loc[r], query_start_loc[r + 1]]`. Later tokens of the request have the
            same results as without this argument. None: after the request's last token.

    Returns:
        The results f32[num_tokens, ...], and the states of each request.
    """
    num_used = (query_start_loc[:-1] < query_start_loc[-1]).sum(dtype=jnp.int32)
    ends = query_start_loc[1:] if state_ends is None else state_ends

    def turn(idx: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, out = carry
        state, result = step(state, *(array[idx] for array in tokens))
        return state, out.at[idx].set(result)

    # The inner loops carry the state of one request. On the CPU, a loop that reads and writes
    # `states` for each token copies the states of all requests for each token.
    def run_request(
        req: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        states, out = carry
        carry = (states[req], out)
        state, out = jax.lax.fori_loop(query_start_loc[req], ends[req], turn, carry)
        if state_ends is not None:
            _, out = jax.lax.fori_loop(ends[req], query_start_loc[req + 1], turn, (state, out))
        return states.at[req].set(state), out

    found, out = jax.lax.fori_loop(0, num_used, run_request, (states, out))
    return out, found


def scan_chunks(
    chunk_step: Callable[..., tuple[jax.Array, jax.Array]],
    step: Callable[..., tuple[jax.Array, jax.Array]],
    states: jax.Array,  # f32[num_reqs, ...]
    tokens: tuple[jax.Array, ...],  # f32[num_tokens, ...] each
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    positions: jax.Array,  # i32[num_tokens]
    out: jax.Array,  # f32[num_tokens, ...], the results of tokens of no request
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    *,
    chunk_size: int,
    min_chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Like `scan_tokens`, but computes the consecutive tokens of a request in chunks.

    A chunk ends before the positions that are multiples of `chunk_size`, so a prompt that is cut
    there has the same chunks, and the same bits. With a chunk size of 4, tokens at the positions 2
    to 9 are the chunks 2..3, 4..7 and 8..9. A chunk also ends before `state_ends`.

    Args:
        chunk_step: As `step`, for `chunk_size` tokens. Tokens after the end of the chunk are zeros:
            they must not change the state.
        step: As in `scan_tokens`. It computes chunks of fewer than `min_chunk` tokens.
        positions: Of each token in its request.
    """
    num_tokens, num_reqs = out.shape[0], states.shape[0]
    req_of_token = request_of_token(query_start_loc, num_tokens)
    rows = _StateRows.of_tokens(req_of_token, num_reqs, state_ends)

    def padded(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, chunk_size)] + [(0, 0)] * (array.ndim - 1))

    tokens, out = tuple(map(padded, tokens)), padded(out)

    def run_chunk(
        state: jax.Array, chunk: tuple[jax.Array, ...], count: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return chunk_step(state, *(_first_rows(array, count) for array in chunk))

    def run_tokens(
        state: jax.Array, chunk: tuple[jax.Array, ...], count: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def turn(idx: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, results = carry
            state, result = step(state, *(array[idx] for array in chunk))
            return state, results.at[idx].set(result)

        results = jnp.zeros((chunk_size, *out.shape[1:]), out.dtype)
        return jax.lax.fori_loop(0, count, turn, (state, results))

    def turn(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        idx, states, out = carry
        req = req_of_token[idx]
        end = query_start_loc[req + 1]
        if state_ends is not None:
            end = jnp.where(idx < state_ends[req], state_ends[req], end)
        count = jnp.minimum(end - idx, chunk_size - positions[idx] % chunk_size)
        chunk = tuple(jax.lax.dynamic_slice_in_dim(array, idx, chunk_size) for array in tokens)
        state, results = jax.lax.cond(
            count < min_chunk, run_tokens, run_chunk, states[rows.read[idx]], chunk, count
        )
        # Rows after the end of the chunk are written again by the chunks after it.
        out = jax.lax.dynamic_update_slice_in_dim(out, results, idx, axis=0)
        return idx + count, states.at[rows.write[idx]].set(state), out

    carry = (jnp.int32(0), _with_last_row(states, state_ends), out)
    _, found, out = jax.lax.while_loop(lambda carry: carry[0] < query_start_loc[-1], turn, carry)
    return out[:num_tokens], found[:num_reqs]


def _first_rows(array: jax.Array, count: jax.Array) -> jax.Array:
    """The array with zeros in all rows except the first `count`."""
    is_used = jnp.arange(array.shape[0], dtype=jnp.int32) < count
    return jnp.where(is_used.reshape(-1, *[1] * (array.ndim - 1)), array, 0)


def sums_between(
    log_decay: jax.Array,  # f32[size, num_heads]
) -> jax.Array:  # f32[num_heads, size, size]
    """For each pair of tokens, the sum after the second one up to the first one: [head, to, from].

    Pairs in the other order have minus infinity. Each sum is added up by itself, because the
    difference of two running totals would lose the digits that the totals have in common.
    """
    size = log_decay.shape[0]
    token = jnp.arange(size, dtype=jnp.int32)
    is_after = token[:, None] > token  # [token, from]
    terms = jnp.where(is_after[None], log_decay.T[:, :, None], 0.0)  # [head, token, from]
    sums = jax.lax.dot_general(
        jnp.tril(jnp.ones((size, size), jnp.float32)),
        terms,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
    )  # [to, head, from]
    return jnp.where((token[:, None] >= token)[None], sums.swapaxes(0, 1), -jnp.inf)


def step_rows(
    step: Callable[..., tuple[jax.Array, jax.Array]],
    states: jax.Array,  # f32[num_reqs, ...]
    tokens: tuple[jax.Array, ...],  # f32[num_reqs, ...] each
) -> tuple[jax.Array, jax.Array]:
    """Like `scan_tokens` if request r has token r or no token: one call of `step` for all rows.

    A request without a token also gets a new state, which is meaningless.
    """
    states, out = step(states, *tokens)
    return out, states
