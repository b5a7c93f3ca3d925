"""Draws a token for each row from logits that were computed before, some rows at a time."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paxkv.runner.memory.device_mesh import keep_split
from paxkv.runner.sampling.logits_processors import needs_processing, process_logits
from paxkv.runner.sampling.row_state import RowState
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH, pack_result
from paxkv.runner.sampling.sampler import argmax_grouped, sample
from paxkv.runner.sampling.sampling_columns import Processors, decode_processors, decode_step_rows


def draw_rows(
    logits: jax.Array,  # f32[num_rows or more, vocab]
    state: RowState,
    sampling: jax.Array,  # i32[num_rows, step_row_width]
    token_mask: jax.Array | None,  # i32[num_rows, 1 + vocab_words], as `process_logits` takes it
    *,
    chunk_rows: int,
    mesh: Mesh | None,
    greedy_ids: jax.Array | None = None,  # i32[num_rows]
) -> tuple[jax.Array, RowState]:  # i32[num_rows, RESULT_WIDTH]
    """Draws a token for each row with a `draw_position` above 0, and adds it to the row's tokens.

    Results of other rows are undefined.

    Args:
        chunk_rows: Rows that are drawn at a time, up to the last row that draws.
        mesh: The devices that the logits are split over, if there are several.
        greedy_ids: The most likely token of each row, if known. They are the result if no row needs
            more. Rows that did not ask for log-probabilities may get them too.
    """
    num_rows = sampling.shape[0]
    chunk_rows = min(chunk_rows, num_rows)

    def draw_chunk(chunk_idx: jax.Array, result: jax.Array) -> jax.Array:
        # The last chunk may begin earlier and draw some rows again, with the same result.
        start = jnp.minimum(chunk_idx * chunk_rows, num_rows - chunk_rows)

        def rows_of(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, start, chunk_rows)

        drawn = _draw_chunk(
            lambda: keep_split(rows_of(logits), mesh),
            state,
            rows_of(sampling),
            None if token_mask is None else rows_of(token_mask),
            None if greedy_ids is None else rows_of(greedy_ids),
            mesh,
        )
        return jax.lax.dynamic_update_slice_in_dim(result, drawn, start, axis=0)

    if greedy_ids is None:
        result = jnp.zeros((num_rows, RESULT_WIDTH), jnp.int32)
    else:
        result = jnp.pad(greedy_ids[:, None], ((0, 0), (0, RESULT_WIDTH - 1)))
    num_chunks = _num_chunks(sampling, token_mask, chunk_rows, may_skip=greedy_ids is not None)
    if chunk_rows < num_rows:
        result = jax.lax.fori_loop(0, num_chunks, draw_chunk, result)
    else:
        # Not a loop: on an accelerator, the host waits for the number of iterations.
        result = jax.lax.cond(
            num_chunks > 0, lambda: draw_chunk(jnp.int32(0), result), lambda: result
        )
    positions = decode_processors(sampling).draw_position
    return result, record_tokens(state, sampling, result[:, 0], positions)


def _num_chunks(
    sampling: jax.Array, token_mask: jax.Array | None, chunk_rows: int, *, may_skip: bool
) -> jax.Array:  # i32[]
    """Chunks up to the last row that draws; 0 if `may_skip` and all draw the greedy token."""
    rows = decode_step_rows(sampling)
    row_ends = jnp.arange(1, sampling.shape[0] + 1, dtype=jnp.int32)
    num_rows = jnp.max(jnp.where(rows.is_drawn, row_ends, 0))
    num_chunks = (num_rows + chunk_rows - 1) // chunk_rows
    if not may_skip:
        return num_chunks
    wants_more = jnp.any(rows.is_drawn & ((rows.temperature > 0) | rows.wants_logprobs))
    wants_more |= needs_processing(decode_processors(sampling), token_mask)
    return jnp.where(wants_more, num_chunks, 0)


def _draw_chunk(
    logits_of: Callable[[], jax.Array],  # f32[chunk_rows, vocab]
    state: RowState,
    sampling: jax.Array,  # i32[chunk_rows, step_row_width]
    token_mask: jax.Array | None,
    greedy_ids: jax.Array | None,
    mesh: Mesh | None,
) -> jax.Array:  # i32[chunk_rows, RESULT_WIDTH]
    inputs = decode_processors(sampling)

    def process() -> tuple[jax.Array, jax.Array | None]:
        processed = process_logits(logits_of(), inputs, state, token_mask, mesh)
        return processed, None if greedy_ids is None else argmax_grouped(processed, mesh)

    # Both branches slice: a slice before the branches would be copied once more.
    processed, greedy_ids = jax.lax.cond(
        needs_processing(inputs, token_mask), process, lambda: (logits_of(), greedy_ids)
    )
    processed = keep_split(processed, mesh)
    sampled = sample(
        processed,
        decode_step_rows(sampling),
        raw_logits=logits_of,
        greedy_ids=greedy_ids,
        mesh=mesh,
    )
    return pack_result(sampled)


def record_tokens(
    state: RowState,
    sampling: jax.Array,  # i32[num_rows, step_row_width]
    token_ids: jax.Array,  # i32[num_rows]
    positions: jax.Array,  # i32[num_rows]
) -> RowState:
    """Writes tokens to the histories of rows that draw and whose draws depend on a history."""
    inputs = decode_processors(sampling)
    num_rows = state.token_ids.shape[0]
    row = jnp.where(inputs.has(Processors.TOKEN_HISTORY), inputs.row, num_rows)
    history = state.token_ids.at[row, positions].set(token_ids, mode="drop")
    return dataclasses.replace(state, token_ids=history)
