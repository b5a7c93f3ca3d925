"""`StepTimes`: the expected duration of steps of one size."""

import bisect
import itertools
from collections import deque

# The median of this many measurements is the expected time of the next step.
_NUM_TIMES = 5
# If the times have aged to less than this factor, a new time replaces all of them.
_OLD_FACTOR = 0.8
# Drafts are not tried before this many measurements without drafts, because one may be unusual.
MIN_TIMES = 3
# Pacers divide by times. A clock that ticks rarely may say that a step took no time.
_MIN_S = 1e-9


class StepTimes:
    """Durations of the most recent steps of one size."""

    def __init__(self) -> None:
        # Seconds of a step, and how many steps were measured together.
        self._recent: deque[tuple[float, int]] = deque(maxlen=_NUM_TIMES)
        self._factor = 1.0

    @property
    def expected_s(self) -> float:
        """The expected time, if it is known."""
        return self.expected_at_least(0.0)

    def expected_at_least(self, low_s: float) -> float:
        """The expected time, if steps of this size cannot be faster than `low_s`.

        Unless their time is known, they are expected to take `low_s`.
        """
        return self._factor * max(self._median_s() if self.is_known else 0.0, low_s)

    @property
    def is_known(self) -> bool:
        """Whether several steps were measured; of two, the faster one is expected."""
        return len(self._recent) > 1

    @property
    def num_measured(self) -> int:
        """Number of measurements that the expected time is based on; at most 5."""
        return len(self._recent)

    def record(self, took_s: float, num_steps: int = 1) -> None:
        """Records a step, or the average of several steps that were measured together."""
        if self._factor < _OLD_FACTOR:
            self._recent.clear()
        self._recent.append((max(took_s, _MIN_S), num_steps))
        self._factor = 1.0

    def age(self, factor: float) -> None:
        """Lowers the expected time, until it is measured again."""
        self._factor *= factor

    def _median_s(self) -> float:
        """The median over all steps: an average of several steps counts once for each step."""
        recent = sorted(self._recent)
        num_steps = [0, *itertools.accumulate(num_steps for _, num_steps in recent)]
        return recent[bisect.bisect_left(num_steps, num_steps[-1] / 2) - 1][0]


def round_up(count: int) -> int:
    """The next power of two. Steps of about the same size have about the same duration."""
    return 1 << (count - 1).bit_length()
