"""The compiled sampler: one program that draws from the logits of any step."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from paxkv.runner.sampling.accept_drafts import accept_drafts, record_given
from paxkv.runner.sampling.draw_rows import draw_rows
from paxkv.runner.sampling.row_state import RowState
from paxkv.runner.shapes.program_shapes import SamplerShape

# (logits, state, sampling, token_mask) -> (logits, state, result, next_tokens)
SamplerFunction = Callable[
    [jax.Array, RowState, jax.Array, jax.Array], tuple[jax.Array, RowState, jax.Array, jax.Array]
]


def make_sampler(shape: SamplerShape, mesh: Mesh | None) -> SamplerFunction:
    """The sampler of one shape, not yet compiled. It takes what a step of `make_step` returns.

    Its result i32[max_draws, num_reqs, RESULT_WIDTH] has the draws of each request (`pack_result`),
    like a burst of `max_draws` steps. The result of requests that draw nothing is undefined.
    `next_tokens` i32[num_reqs] are the first draws. The next step reads them as `prev_tokens`, so
    it can start before the host has them. The logits are returned unchanged, so that a step that
    overwrites them must wait for this program.

    With `max_draws` above 1, a request draws the token at each draft's position and the token after
    its last draft. Its tokens end with the first token that differs from its draft.

    Args:
        mesh: The devices, if there are several.
    """

    def draw(
        logits: jax.Array,  # f32[num_rows, vocab]
        state: RowState,
        sampling: jax.Array,  # i32[num_rows, step_row_width]
        token_mask: jax.Array,  # i32[num_rows, 1 + vocab_words], as `process_logits` takes it
    ) -> tuple[jax.Array, RowState, jax.Array, jax.Array]:
        if shape.max_draws > 1:
            state = record_given(state, sampling)
        result, state = draw_rows(
            logits, state, sampling, token_mask, chunk_rows=shape.chunk_rows, mesh=mesh
        )
        by_req = result[None] if shape.max_draws == 1 else accept_drafts(result, sampling, shape)
        return logits, state, by_req, by_req[0, :, 0]

    return draw
