"""`LogitsCheck`: counts requests whose logits are not finite numbers."""

from collections.abc import Collection, Sequence

import numpy as np

from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes.sampling_row import WANTS_LOGPROBS

# Columns of `pack_result`: the drawn token, and its log-probability as bits.
_TOKEN_COLUMN, _LOGPROB_COLUMN = 0, 1


class LogitsCheck:
    """Makes every row request the log-probability of its drawn token, and checks it.

    It is NaN if one of the row's logits is NaN or +inf. The check needs no programs of its own.
    """

    def __init__(self) -> None:
        self.num_corrupted_requests = 0
        # Unfinished requests that have been counted.
        self._counted: set[str] = set()

    def request_logprobs(
        self,
        sampling_rows_np: np.ndarray,  # i32[max_num_seqs, NUM_COLUMNS]
    ) -> None:
        """Makes every row request log-probabilities."""
        sampling_rows_np[:, WANTS_LOGPROBS] = 1

    def count(
        self,
        req_ids: Sequence[str],
        num_drawn_np: np.ndarray,  # i32[num_reqs], most tokens that the step drew for each
        result_np: np.ndarray,  # i32[max_steps, num_reqs or more, RESULT_WIDTH or more]
        *,
        unfinished: Collection[str],
    ) -> None:
        """Counts requests of a step whose logits are not finite. Each request counts once."""
        self._counted.intersection_update(unfinished)
        token_ids_np = result_np[:, : len(req_ids), _TOKEN_COLUMN]
        logprobs_np = result_np[:, : len(req_ids), _LOGPROB_COLUMN].view(np.float32)
        step_idx_np = np.arange(len(result_np), dtype=np.int32)[:, None]
        # A request that ends inside a burst draws fewer tokens than were planned.
        is_drawn_np = (step_idx_np < num_drawn_np) & (token_ids_np != NO_TOKEN)
        is_corrupted_np = (~np.isfinite(logprobs_np) & is_drawn_np).any(axis=0)
        corrupted = {req_ids[idx] for idx in np.flatnonzero(is_corrupted_np)}
        self.num_corrupted_requests += len(corrupted - self._counted)
        self._counted |= corrupted
