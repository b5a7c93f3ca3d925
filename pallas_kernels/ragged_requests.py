"""Steps over packed tokens of several requests, for ops that carry a state per request.

Request r has tokens `query_start_loc[r]:query_start_loc[r + 1]`. Tokens at or past the last entry
belong to no request.
"""

from collections.abc import Callable
from typing import TypeVar

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


def scan_tokens(
    step: Callable[..., tuple[jax.Array, jax.Array]],
    states: jax.Array,  # f32[num_reqs, ...]
    tokens: tuple[jax.Array, ...],  # f32[num_tokens, ...] each
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    out: jax.Array,  # f32[num_tokens, ...], the results of tokens of no request
) -> tuple[jax.Array, jax.Array]:
    """Calls `step(state, *token)` for the tokens of requests, one after the other.

    The loop runs once per such token, so padding costs nothing.

    Args:
        step: Returns the request's new state, and the result of the token.

    Returns:
        The results f32[num_tokens, ...], and the states after each request's last token.
    """
    req_of_token = request_of_token(query_start_loc, out.shape[0])

    def turn(idx: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, out = carry
        req = req_of_token[idx]
        state, result = step(states[req], *(array[idx] for array in tokens))
        return states.at[req].set(state), out.at[idx].set(result)

    states, out = jax.lax.fori_loop(0, query_start_loc[-1], turn, (states, out))
    return out, states


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


def fits_one_token_each(counts: tuple[int, ...], num_padding: int) -> bool:
    """Whether `step_rows` can compute a step: each row is one token of a request, or padding.

    Args:
        counts: Tokens of each request.
        num_padding: Rows of no request, after all others.
    """
    num_decodes = counts.count(1)
    has_decodes_first = counts == (1,) * num_decodes + (0,) * (len(counts) - num_decodes)
    return has_decodes_first and num_decodes + num_padding == len(counts)
