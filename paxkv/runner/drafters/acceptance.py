"""`Acceptance`: how often a drafter's proposals for a request turn out right."""

from collections.abc import Sequence

# Weight of an older comparison, for each newer one.
_DECAY = 0.9
_TOTAL_DECAY = 0.99
# A request counts as if it had this many comparisons with the result of all requests.
_PRIOR_TRIALS = 2.0


class TotalAcceptance:
    """The acceptance of several requests together, which another request is expected to have."""

    def __init__(self) -> None:
        # Unknown drafters are tried, so they start with one right draft of two.
        self._num_right, self._num_trials = 1.0, 2.0

    @property
    def rate(self) -> float:
        """Estimated probability that a draft is right if the drafts before it are."""
        return self._num_right / self._num_trials

    def record(self, num_right: int, num_trials: int) -> None:
        self._num_right = _TOTAL_DECAY * self._num_right + num_right
        self._num_trials = _TOTAL_DECAY * self._num_trials + num_trials


class Acceptance:
    """Compares the proposals for one request with the tokens that are then drawn.

    It needs no verification: proposals that were not sent to the device count too.

    Args:
        total: Of the requests that this one is like.
    """

    def __init__(self, total: TotalAcceptance) -> None:
        self._total = total
        self._num_right = self._num_trials = 0.0
        self._proposal: Sequence[int] = ()

    def start_over(self, total: TotalAcceptance) -> None:
        """Forgets the comparisons so far, and belongs to other requests from here on."""
        if self._total is not total:
            self._total = total
            self._num_right = self._num_trials = 0.0

    @property
    def rate(self) -> float:
        """See `TotalAcceptance.rate`."""
        num_right = self._num_right + _PRIOR_TRIALS * self._total.rate
        return num_right / (self._num_trials + _PRIOR_TRIALS)

    def record_proposal(self, token_ids: Sequence[int]) -> None:
        """Records what was proposed after the last tokens."""
        self._proposal = token_ids

    def record_drawn(self, token_ids: Sequence[int]) -> None:
        """Records the tokens after the last proposal.

        A draft counts up to and including the first wrong one. Example: proposal [7, 8, 9] and
        tokens [7, 5] -> 1 right of 2. Tokens [7] -> 1 right of 1.
        """
        num_right = num_trials = 0
        for draft_id, token_id in zip(self._proposal, token_ids, strict=False):
            num_trials += 1
            if draft_id != token_id:
                break
            num_right += 1
        self._proposal = ()
        if num_trials:
            self._num_right = _DECAY * self._num_right + num_right
            self._num_trials = _DECAY * self._num_trials + num_trials
            self._total.record(num_right, num_trials)
