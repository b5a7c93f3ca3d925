"""`Acceptance`: how often a drafter's proposals for a request turn out right."""

import itertools
import operator
from collections.abc import Iterable, Sequence

# Each newer comparison multiplies the weight of older ones by this factor: of one request, and of
# all requests.
_DECAY = 0.9
_TOTAL_DECAY = 0.99
# A rate counts as if there were this many more comparisons, whose result is the expected rate. For
# a place of one request, this is the rate of all requests. For a place of all requests, it is the
# rate of the place before.
_PRIOR_TRIALS = 2.0
# Unknown drafters are tried, so half of their first drafts are expected to be right.
_FIRST_RATE = 0.5


class _Comparisons:
    """Counts right drafts by their place in the proposal, if the drafts before them are right."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._num_right: list[float] = []
        self._num_trials: list[float] = []

    def record(self, place: int, is_right: bool) -> None:
        while place >= len(self._num_trials):
            self._num_right.append(0.0)
            self._num_trials.append(0.0)
        self._num_right[place] = self._decay * self._num_right[place] + is_right
        self._num_trials[place] = self._decay * self._num_trials[place] + 1

    def rate(self, place: int, prior_rate: float) -> float:
        if place >= len(self._num_trials):
            return prior_rate
        num_right = self._num_right[place] + _PRIOR_TRIALS * prior_rate
        return num_right / (self._num_trials[place] + _PRIOR_TRIALS)

    def rates(self, prior_rates: list[float]) -> list[float]:
        """As `rate`, for the first places. `prior_rates` has one rate for each of them."""
        compared = zip(self._num_right, self._num_trials, prior_rates, strict=False)
        rates = [
            (num_right + _PRIOR_TRIALS * prior_rate) / (num_trials + _PRIOR_TRIALS)
            for num_right, num_trials, prior_rate in compared
        ]
        return rates + prior_rates[len(rates) :]


class TotalAcceptance:
    """The acceptance of several requests together, which another request is expected to have."""

    def __init__(self) -> None:
        self._comparisons = _Comparisons(_TOTAL_DECAY)
        # A cache of `rates`, because each request of a step asks for them. `record` clears it.
        self._rates: list[float] = []

    def rates(self, num_drafts: int) -> list[float]:
        """By place in a proposal, the probability of a right draft if those before it are right."""
        while len(self._rates) < num_drafts:
            before = self._rates[-1] if self._rates else _FIRST_RATE
            self._rates.append(self._comparisons.rate(len(self._rates), before))
        return self._rates[:num_drafts]

    def chances(self, num_drafts: int) -> list[float]:
        """By place in a proposal, the probability that the draft and all before it are right."""
        return _products(self.rates(num_drafts))

    def record(self, place: int, is_right: bool) -> None:
        self._comparisons.record(place, is_right)
        self._rates.clear()


class Acceptance:
    """Compares the proposals for one request with the tokens that are then drawn.

    It needs no verification: proposals that were not sent to the device count too.

    Args:
        total: The acceptance of requests like this one.
    """

    def __init__(self, total: TotalAcceptance) -> None:
        self._start(total)

    def _start(self, total: TotalAcceptance) -> None:
        self._total = total
        self._comparisons = _Comparisons(_DECAY)
        # The rest of a proposal, and the place of its first token.
        self._proposal: Sequence[int] = ()
        self._place = 0

    def start_over(self, total: TotalAcceptance) -> None:
        """Counts for `total` from now on. If it counted for another, forgets its comparisons."""
        if self._total is not total:
            self._start(total)

    def chances(self, num_drafts: int) -> list[float]:
        """See `TotalAcceptance.chances`."""
        return _products(self._comparisons.rates(self._total.rates(num_drafts)))

    @property
    def needs_proposal(self) -> bool:
        """Whether no token of a proposal waits for its comparison, so a new one is not ignored."""
        return not self._proposal

    def record_proposal(self, token_ids: Sequence[int]) -> None:
        """Records what was proposed after the last tokens.

        The proposal is ignored while tokens of an older one wait for their comparison. So later
        drafts are compared too, even if each step draws one token.
        """
        if not self._proposal:
            self._proposal, self._place = token_ids, 0

    def record_drawn(self, token_ids: Sequence[int]) -> None:
        """Records the tokens that were drawn after the tokens before.

        A draft counts up to and including the first wrong one. Example: proposal [7, 8, 9] and
        tokens [7, 5] -> 1 right of 2. After the token [7], drafts 8 and 9 wait for more tokens.
        """
        proposal, self._proposal = self._proposal, ()
        num_compared = min(len(proposal), len(token_ids))
        for draft_id, token_id in zip(proposal, token_ids, strict=False):
            is_right = draft_id == token_id
            self._comparisons.record(self._place, is_right)
            self._total.record(self._place, is_right)
            self._place += 1
            if not is_right:
                return
        self._proposal = proposal[num_compared:]


def _products(rates: Iterable[float]) -> list[float]:
    return [*itertools.accumulate(rates, operator.mul)]
