"""`BurstDraftPacer`: decides whether the next burst verifies drafts, from measured times."""

import time
from collections import defaultdict
from collections.abc import Callable

from paxkv.runner.drafters.step_times import StepTimes, round_up

# With every burst, the expected time of the choice that was not made falls by this factor, so that
# it is tried again.
_AGING = 0.995


class BurstDraftPacer:
    """Compares bursts with drafts and bursts without them by their seconds per token of a request.

    The time of a burst with drafts depends on how many of them are accepted, because all bursts
    draw the same number of tokens in fewer or more steps.

    Args:
        clock: Returns seconds; it never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_fetch_s: float | None = None
        # By rounded number of requests, and by whether the bursts verify drafts.
        self._times: defaultdict[tuple[int, bool], StepTimes] = defaultdict(StepTimes)

    def record_step(self, *, num_reqs: int, num_decode_steps: int, verifies_drafts: bool) -> None:
        """Records that the tokens of a step were fetched just now.

        Args:
            num_decode_steps: Above 1 for a burst. The time of other steps is not recorded.
        """
        now_s = self._clock()
        last_s, self._last_fetch_s = self._last_fetch_s, now_s
        # The engine was busy since the last fetch, because all requests had a step before a burst.
        if last_s is not None and num_decode_steps > 1:
            times = self._times[round_up(num_reqs), verifies_drafts]
            times.record((now_s - last_s) / num_decode_steps)

    def choose(self, num_reqs: int) -> bool:
        """Returns whether a burst of `num_reqs` requests should verify drafts."""
        size = round_up(num_reqs)
        drafting, plain = self._times[size, True], self._times[size, False]
        if not (drafting.is_known and plain.is_known):
            return plain.is_known
        is_faster = drafting.expected_s < plain.expected_s
        (plain if is_faster else drafting).age(_AGING)
        return is_faster
