"""`StepTimes`: the expected duration of steps of one size."""

import statistics
from collections import deque

# The median of this many steps is the expected time of the next one.
_NUM_TIMES = 5
# If the times have aged to less than this factor, a new time replaces all of them.
_OLD_FACTOR = 0.8


class StepTimes:
    """Durations of the most recent steps of one size."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._factor = 1.0

    @property
    def expected_s(self) -> float:
        """The expected time, if a step was measured."""
        return self.expected_at_least(0.0)

    def expected_at_least(self, low_s: float) -> float:
        """The expected time, if steps of this size cannot be faster than `low_s`.

        Without a measurement, they are expected to take `low_s`.
        """
        median_s = statistics.median(self._recent_s) if self._recent_s else 0.0
        return self._factor * max(median_s, low_s)

    @property
    def is_known(self) -> bool:
        return bool(self._recent_s)

    def record(self, took_s: float) -> None:
        if self._factor < _OLD_FACTOR:
            self._recent_s.clear()
        self._recent_s.append(took_s)
        self._factor = 1.0

    def age(self, factor: float) -> None:
        """Lowers the expected time, until it is measured again."""
        self._factor *= factor


def round_up(count: int) -> int:
    """The next power of two. Steps of about the same size have about the same duration."""
    return 1 << (count - 1).bit_length()
