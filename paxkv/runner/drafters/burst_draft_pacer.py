"""`BurstDraftPacer`: decides whether the next burst verifies drafts, from measured times."""

import time
from collections import defaultdict
from collections.abc import Callable

from paxkv.runner.drafters.draft_budget import DraftBudget
from paxkv.runner.drafters.step_times import MIN_TIMES, StepTimes, round_up

# With every burst, the expected time of the choice that was not made falls by this factor, so that
# it is tried again.
_AGING = 0.995
# The first burst with drafts is tried if the budget covers this many times the time without drafts.
_FIRST_FACTOR = 1.5


class BurstDraftPacer:
    """Compares bursts with drafts and bursts without them by their seconds per token of a request.

    The time of a burst with drafts depends on how many of them are accepted, because all bursts
    draw the same number of tokens in fewer or more steps. While the `DraftBudget` is spent, no
    burst verifies drafts.

    Args:
        clock: Returns seconds; it never goes back. See `Platform.step_clock`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_fetch_s: float | None = None
        # By rounded number of requests, and by whether the bursts verify drafts.
        self._times: defaultdict[tuple[int, bool], StepTimes] = defaultdict(StepTimes)
        self._budget = DraftBudget()
        # Bursts to fetch before the time of the last tried burst is known; two are in flight.
        self._num_untimed = 0

    def record_step(self, *, num_reqs: int, num_decode_steps: int, verifies_drafts: bool) -> None:
        """Records that the tokens of a step were fetched just now.

        Args:
            num_decode_steps: Above 1 for a burst. The time of other steps is not recorded.
        """
        now_s = self._clock()
        last_s, self._last_fetch_s = self._last_fetch_s, now_s
        # The engine was busy since the last fetch, because all requests had a step before a burst.
        if last_s is None or num_decode_steps == 1:
            return
        took_s = now_s - last_s
        self._num_untimed = max(0, self._num_untimed - 1)
        self._times[round_up(num_reqs), verifies_drafts].record(took_s / num_decode_steps)
        if verifies_drafts:
            self._budget.record_drafting(
                num_reqs,
                took_s,
                num_drawn=num_reqs * num_decode_steps,
                num_rows=2 * num_reqs,
                num_steps=num_decode_steps,
            )
        else:
            self._budget.record_plain(num_reqs, took_s, num_decode_steps)

    def choose(self, num_reqs: int, num_decode_steps: int) -> bool:
        """Returns whether a burst of `num_reqs` requests should verify drafts."""
        size = round_up(num_reqs)
        drafting, plain = self._times[size, True], self._times[size, False]
        if plain.num_measured < MIN_TIMES or self._budget.is_spent:
            return False
        if not drafting.is_known:
            num_drawn = num_reqs * num_decode_steps
            longest_s = _FIRST_FACTOR * num_decode_steps * self._budget.plain_s(num_reqs)
            affordable_s = self._budget.affordable_s(num_reqs, num_drawn)
            if self._num_untimed or longest_s > affordable_s:
                return False
            self._num_untimed = 2
            return True
        is_faster = drafting.expected_s < plain.expected_s
        (plain if is_faster else drafting).age(_AGING)
        return is_faster
