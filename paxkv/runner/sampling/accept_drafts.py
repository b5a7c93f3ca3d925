"""Verifies drafts: a draft is accepted if it is the token that is drawn for its position.

A token is drawn with randomness that depends on the request's seed and the position alone.
Therefore, a request gets the same tokens with drafts as without them.
"""

import jax
import jax.numpy as jnp

from paxkv.runner.sampling.draw_rows import record_tokens
from paxkv.runner.sampling.row_state import RowState
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes.program_shapes import SamplerShape
from paxkv.runner.shapes.sampling_row import DRAW_IDX, DRAW_POSITION, DRAW_REQ, GIVEN_ID


def record_given(
    state: RowState,
    sampling: jax.Array,  # i32[num_rows, step_row_width]
) -> RowState:
    """Adds the drafts to the histories of their requests, for the draws after them.

    A rejected draft stays in the history until the token for its position is drawn. A kept draw
    never reads it, because draws read only positions before their own.
    """
    return record_tokens(state, sampling, sampling[:, GIVEN_ID], sampling[:, DRAW_POSITION] - 1)


def accept_drafts(
    result: jax.Array,  # i32[num_rows, RESULT_WIDTH]
    sampling: jax.Array,  # i32[num_rows, step_row_width]
    shape: SamplerShape,
) -> jax.Array:  # i32[max_draws, num_reqs, RESULT_WIDTH]
    """Groups the draws by request, and replaces draws that follow a rejected draft by `NO_TOKEN`.

    Example: a request with the drafts 7, 8 draws 7, 9, 5. Its tokens are 7, 9. The third draw
    followed a token that is not part of the answer.
    """
    draw_idx = jnp.where(sampling[:, DRAW_POSITION] > 0, sampling[:, DRAW_IDX], shape.max_draws)
    places = (draw_idx, sampling[:, DRAW_REQ])

    def group(rows: jax.Array) -> jax.Array:  # [num_rows, ...] -> [max_draws, num_reqs, ...]
        dims = (shape.max_draws, shape.num_reqs, *rows.shape[1:])
        return jnp.full(dims, NO_TOKEN, jnp.int32).at[places].set(rows, mode="drop")

    drawn, given_ids = group(result), group(sampling[:, GIVEN_ID])
    # Row j follows the draft that row j - 1 verifies.
    is_right = drawn[:-1, :, 0] == given_ids[1:]
    is_accepted = jnp.cumprod(is_right.astype(jnp.int32), axis=0) != 0
    is_kept = jnp.concatenate([jnp.ones((1, shape.num_reqs), bool), is_accepted])
    return jnp.where(is_kept[:, :, None], drawn, NO_TOKEN)
