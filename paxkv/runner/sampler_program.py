"""The compiled sampler of mixed steps: one program draws from the logits that any of them left."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxkv.runner.bucketing import SamplerShape
from paxkv.runner.sampled_tokens import RESULT_WIDTH, pack_result
from paxkv.runner.sampler import sample
from paxkv.runner.sampling_columns import decode_step_rows

# (logits, sampling) -> (logits, result, next_tokens)
SamplerFunction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def make_sampler(shape: SamplerShape) -> SamplerFunction:
    """The sampler of one shape, not yet compiled; it takes what a step of `make_step` returns.

    It goes through `chunk_rows` rows at a time, and no further than the last row that draws.
    Its result i32[1, num_rows, RESULT_WIDTH] holds a row per row of the logits (`pack_result`), as
    a burst of one step would; what stands in rows that draw nothing belongs to nobody.
    `next_tokens` i32[num_rows] are the drawn tokens, for the next step's `prev_tokens`: so it can
    start before the host has seen them. The logits are handed back as they came: who is to
    overwrite them next has to wait for this program.
    """

    def draw_chunk(
        chunk_idx: jax.Array,
        result: jax.Array,
        logits: jax.Array,
        sampling: jax.Array,
    ) -> jax.Array:
        # The last chunk may begin earlier than it would, and draw some rows again: as before.
        start = jnp.minimum(chunk_idx * shape.chunk_rows, shape.num_rows - shape.chunk_rows)

        def rows_of(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, start, shape.chunk_rows)

        sampled = sample(rows_of(logits), decode_step_rows(rows_of(sampling)))
        return jax.lax.dynamic_update_slice_in_dim(result, pack_result(sampled), start, axis=0)

    def draw(
        logits: jax.Array,  # f32[num_rows, vocab]
        sampling: jax.Array,  # i32[num_rows, STEP_ROW_WIDTH]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        is_drawn = decode_step_rows(sampling).is_drawn
        row_ends = jnp.arange(1, shape.num_rows + 1, dtype=jnp.int32)
        num_rows = jnp.max(jnp.where(is_drawn, row_ends, 0))
        num_chunks = (num_rows + shape.chunk_rows - 1) // shape.chunk_rows
        result = jax.lax.fori_loop(
            0,
            num_chunks,
            lambda chunk_idx, result: draw_chunk(chunk_idx, result, logits, sampling),
            jnp.zeros((shape.num_rows, RESULT_WIDTH), jnp.int32),
        )
        return logits, result[None], result[:, 0]

    return draw
