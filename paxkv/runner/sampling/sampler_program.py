"""The compiled sampler of mixed steps: one program draws from the logits that any of them left."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxkv.runner.sampling.logits_processors import needs_processing, process_logits
from paxkv.runner.sampling.row_state import RowState
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH, pack_result
from paxkv.runner.sampling.sampler import sample
from paxkv.runner.sampling.sampling_columns import Processors, decode_processors, decode_step_rows
from paxkv.runner.shapes.program_shapes import SamplerShape

# (logits, state, sampling, token_mask) -> (logits, state, result, next_tokens)
SamplerFunction = Callable[
    [jax.Array, RowState, jax.Array, jax.Array], tuple[jax.Array, RowState, jax.Array, jax.Array]
]


def make_sampler(shape: SamplerShape) -> SamplerFunction:
    """The sampler of one shape, not yet compiled; it takes what a step of `make_step` returns.

    It goes through `chunk_rows` rows at a time, and no further than the last row that draws.
    Its result i32[1, num_rows, RESULT_WIDTH] holds a row per row of the logits (`pack_result`), as
    a burst of one step would; what stands in rows that draw nothing belongs to nobody.
    `next_tokens` i32[num_rows] are the drawn tokens, for the next step's `prev_tokens`: so it can
    start before the host has seen them. The state gets them too, where a later draw depends on
    them. The logits are handed back as they came: who is to overwrite them next has to wait for
    this program.
    """

    def draw(
        logits: jax.Array,  # f32[num_rows, vocab]
        state: RowState,
        sampling: jax.Array,  # i32[num_rows, STEP_ROW_WIDTH]
        token_mask: jax.Array,  # i32[num_rows, 1 + vocab_words], as `process_logits` takes it
    ) -> tuple[jax.Array, RowState, jax.Array, jax.Array]:

        def draw_chunk(chunk_idx: jax.Array, result: jax.Array) -> jax.Array:
            return _draw_chunk(shape, chunk_idx, result, logits, state, sampling, token_mask)

        result = jnp.zeros((shape.num_rows, RESULT_WIDTH), jnp.int32)
        if shape.chunk_rows == shape.num_rows:
            # No loop: an accelerator's host would wait for its condition.
            result = draw_chunk(jnp.int32(0), result)
        else:
            result = jax.lax.fori_loop(0, _num_chunks(shape, sampling), draw_chunk, result)
        return logits, _note_drawn(state, sampling, result[:, 0]), result[None], result[:, 0]

    return draw


def _num_chunks(shape: SamplerShape, sampling: jax.Array) -> jax.Array:  # i32[]
    """Chunks up to the last row that draws."""
    row_ends = jnp.arange(1, shape.num_rows + 1, dtype=jnp.int32)
    num_rows = jnp.max(jnp.where(decode_step_rows(sampling).is_drawn, row_ends, 0))
    return (num_rows + shape.chunk_rows - 1) // shape.chunk_rows


def _draw_chunk(
    shape: SamplerShape,
    chunk_idx: jax.Array,  # i32[]
    result: jax.Array,  # i32[num_rows, RESULT_WIDTH]
    logits: jax.Array,
    state: RowState,
    sampling: jax.Array,
    token_mask: jax.Array,
) -> jax.Array:
    # The last chunk may begin earlier than it would, and draw some rows again: as before.
    start = jnp.minimum(chunk_idx * shape.chunk_rows, shape.num_rows - shape.chunk_rows)

    def rows_of(array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, start, shape.chunk_rows)

    chunk_sampling, chunk_mask = rows_of(sampling), rows_of(token_mask)
    inputs = decode_processors(chunk_sampling)
    # The slice is taken in both branches: taken before them, it would be copied once more.
    processed = jax.lax.cond(
        needs_processing(inputs, chunk_mask),
        lambda: process_logits(rows_of(logits), inputs, state, chunk_mask),
        lambda: rows_of(logits),
    )
    sampled = sample(
        processed, decode_step_rows(chunk_sampling), raw_logits=lambda: rows_of(logits)
    )
    return jax.lax.dynamic_update_slice_in_dim(result, pack_result(sampled), start, axis=0)


def _note_drawn(
    state: RowState,
    sampling: jax.Array,  # i32[num_rows, STEP_ROW_WIDTH]
    token_ids: jax.Array,  # i32[num_rows]
) -> RowState:
    """Writes the drawn tokens behind those of the rows whose next draw depends on them."""
    inputs = decode_processors(sampling)
    num_rows = sampling.shape[0]
    row = jnp.where(inputs.has(Processors.TOKEN_HISTORY), inputs.row, num_rows)
    history = state.token_ids.at[row, inputs.draw_position].set(token_ids, mode="drop")
    return dataclasses.replace(state, token_ids=history)
