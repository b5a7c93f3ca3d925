"""`DrawPlan`: which tokens of a step get logits, and what the step draws from these logits."""

import dataclasses

import numpy as np

from paxkv.runner.shapes.scheduled_rows import ScheduledRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrawPlan:
    """The rows of logits of one step, in the order of its requests.

    A row draws the token after the token whose logits it has. There are three kinds of rows:

    - A row samples the next token of a request.
    - A row verifies a draft. Draw 0 verifies the first draft, draw 1 the second. Draw 1 follows the
      first draft, so the sampler keeps it only if draw 0 is that draft (`accept_drafts`).
    - A row draws nothing. The step computes a part of a prompt, or the request is pooled.

    After the last draft, a row of the first kind draws one more token.

    Args:
        req_idx_np: i32[num_draws], place of the row's request in the step.
        token_idx_np: i32[num_draws], index in the step of the token whose logits the row has.
        draw_idx_np: i32[num_draws], number of the row among the rows of its request.
        draw_position_np: i32[num_draws], position of the drawn token; 0 if the row draws nothing.
        first_row_np: i32[num_reqs], the first row of each request.
        num_drawn_np: i32[num_reqs], tokens that are drawn for each request.
    """

    req_idx_np: np.ndarray
    token_idx_np: np.ndarray
    draw_idx_np: np.ndarray
    draw_position_np: np.ndarray
    first_row_np: np.ndarray
    num_drawn_np: np.ndarray


def plan_draws(
    rows: ScheduledRows,
    is_pooled_np: np.ndarray,  # bool[num_reqs]
) -> DrawPlan:
    """Plans one row for each request, and one more row for each of its drafts.

    Example: requests that compute [5, 1, 3] tokens, the last 2 of them drafts -> tokens
    [4, 5, 6, 7, 8], draws [0, 0, 0, 1, 2].
    """
    seq_lens_np = rows.num_computed_np + rows.num_scheduled_np
    num_rows_np = 1 + rows.num_drafts_np
    # Positions of drawn tokens do not depend on how the prompt was split, so draws do not either.
    first_position_np = seq_lens_np - rows.num_drafts_np
    is_drawn_np = (first_position_np >= rows.num_tokens_np) & ~is_pooled_np
    req_idx_np = np.repeat(np.arange(len(num_rows_np), dtype=np.int32), num_rows_np)
    first_row_np = np.cumsum(num_rows_np, dtype=np.int32) - num_rows_np
    draw_idx_np = np.arange(len(req_idx_np), dtype=np.int32) - first_row_np[req_idx_np]
    first_token_np = rows.ends_np - num_rows_np
    return DrawPlan(
        req_idx_np=req_idx_np,
        token_idx_np=first_token_np[req_idx_np] + draw_idx_np,
        draw_idx_np=draw_idx_np,
        draw_position_np=(first_position_np * is_drawn_np)[req_idx_np]
        + draw_idx_np * is_drawn_np[req_idx_np],
        first_row_np=first_row_np,
        num_drawn_np=num_rows_np * is_drawn_np,
    )
