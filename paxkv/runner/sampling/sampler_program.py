"""The compiled sampler of steps: one program draws from the logits that any of them left."""

from collections.abc import Callable

import jax

from paxkv.runner.sampling.draw_rows import draw_rows
from paxkv.runner.sampling.row_state import RowState
from paxkv.runner.shapes.program_shapes import SamplerShape

# (logits, state, sampling, token_mask) -> (logits, state, result, next_tokens)
SamplerFunction = Callable[
    [jax.Array, RowState, jax.Array, jax.Array], tuple[jax.Array, RowState, jax.Array, jax.Array]
]


def make_sampler(shape: SamplerShape) -> SamplerFunction:
    """The sampler of one shape, not yet compiled. It takes what a step of `make_step` returns.

    Its result i32[1, num_rows, RESULT_WIDTH] has a row for each row of the logits (`pack_result`),
    like a burst of one step. Rows that draw nothing may hold anything. `next_tokens` i32[num_rows]
    are the drawn tokens, for the next step's `prev_tokens`: this step can start before the host has
    seen them. The logits are returned unchanged, so that a step that overwrites them must wait for
    this program.
    """

    def draw(
        logits: jax.Array,  # f32[num_rows, vocab]
        state: RowState,
        sampling: jax.Array,  # i32[num_rows, STEP_ROW_WIDTH]
        token_mask: jax.Array,  # i32[num_rows, 1 + vocab_words], as `process_logits` takes it
    ) -> tuple[jax.Array, RowState, jax.Array, jax.Array]:
        result, state = draw_rows(logits, state, sampling, token_mask, chunk_rows=shape.chunk_rows)
        return logits, state, result[None], result[:, 0]

    return draw
