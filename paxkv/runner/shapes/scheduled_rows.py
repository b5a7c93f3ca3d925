"""`ScheduledRows`: the requests of one step, and the state of their rows before it."""

import functools
from collections.abc import Sequence

import numpy as np


class ScheduledRows:
    """The requests of a step and the tokens that it computes, concatenated in request order.

    Args:
        rows_np: i32[num_reqs], rows in the `InputBatch`, in the order of the step.
        num_scheduled_np: i32[num_reqs], tokens that the step computes.
        num_computed_np: i32[num_reqs], tokens that were computed before.
        num_tokens_np: i32[num_reqs], tokens whose ids the host knows.
        num_pending_np: i32[num_reqs], further tokens, which steps in flight sample.
        token_ids_np: i32[max_num_seqs, max_model_len], the token ids that the host knows, by row.
        num_drafts_np: i32[num_reqs], how many of the step's tokens are drafts; they come last. None
            means that there are none.
        num_decode_steps: See `SchedulerOutput`.

    Attributes:
        ends_np: i32[num_reqs], one past the request's last token in the step.
        req_of_token_np: i32[num_tokens], place in the step of the token's request.
        row_of_token_np: i32[num_tokens], row of the token's request.
        positions_np: i32[num_tokens].
    """

    def __init__(
        self,
        req_ids: list[str],
        *,
        rows_np: np.ndarray,
        num_scheduled_np: np.ndarray,
        num_computed_np: np.ndarray,
        num_tokens_np: np.ndarray,
        num_pending_np: np.ndarray,
        token_ids_np: np.ndarray,
        num_drafts_np: np.ndarray | None = None,
        num_decode_steps: int = 1,
    ) -> None:
        self.req_ids = req_ids
        self.rows_np = rows_np
        self.num_scheduled_np = num_scheduled_np
        self.num_computed_np = num_computed_np
        self.num_tokens_np = num_tokens_np
        self.num_pending_np = num_pending_np
        self.num_drafts_np = np.zeros_like(rows_np) if num_drafts_np is None else num_drafts_np
        self.token_ids_np = token_ids_np
        self.num_decode_steps = num_decode_steps
        self.ends_np = np.cumsum(num_scheduled_np, dtype=np.int32)
        num_reqs = len(req_ids)
        self.req_of_token_np = np.repeat(np.arange(num_reqs, dtype=np.int32), num_scheduled_np)
        self.row_of_token_np = rows_np[self.req_of_token_np]
        # Position = place in the step + (tokens computed before - start of the token's request).
        shift_np = num_computed_np - (self.ends_np - num_scheduled_np)
        num_tokens = len(self.req_of_token_np)
        self.positions_np = np.arange(num_tokens, dtype=np.int32) + shift_np[self.req_of_token_np]

    @functools.cached_property
    def is_decode(self) -> bool:
        """Whether every request computes only its last token, and drafts if any; or a burst."""
        return self.num_decode_steps > 1 or bool(self._is_decoding_np.all())

    def is_decode_after(self, num_drawn: Sequence[int]) -> bool:
        """As `is_decode`, but requests may also compute the accepted drafts of the last step again.

        Models with states compute them again, because a state cannot go back.

        Args:
            num_drawn: Tokens that each request got from its last step; 0 if it had none.
        """
        return self.is_decode or not self.prompt_req_ids_after(num_drawn)

    def prompt_req_ids_after(self, num_drawn: Sequence[int]) -> list[str]:
        """Requests for which `is_decode_after` is false: a single step computes their prompts.

        Args:
            num_drawn: As in `is_decode_after`.
        """
        if self.is_decode:
            return []
        num_own_np = self.num_scheduled_np - self.num_drafts_np
        has_all_np = self.num_computed_np + num_own_np >= self.num_tokens_np
        are_drawn_np = has_all_np & (num_own_np == np.array(num_drawn, np.int32))
        places = zip(self.req_ids, (self._is_decoding_np | are_drawn_np).tolist(), strict=True)
        return [req_id for req_id, is_decoding in places if not is_decoding]

    @property
    def _is_decoding_np(self) -> np.ndarray:  # bool[num_reqs]
        num_own_np = self.num_scheduled_np - self.num_drafts_np
        return (num_own_np == 1) & (self.num_computed_np + 1 >= self.num_tokens_np)

    def rows_of_fields(self, req_idx: int) -> slice:
        """The rows of a request in fields with a row for each token of the step.

        In a burst, such fields have one row for each request.
        """
        if self.num_decode_steps > 1:
            return slice(req_idx, req_idx + 1)
        end = int(self.ends_np[req_idx])
        return slice(end - int(self.num_scheduled_np[req_idx]), end)
