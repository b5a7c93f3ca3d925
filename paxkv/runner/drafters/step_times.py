"""`StepTimes`: the expected duration of steps of one size."""

import statistics
from collections import deque

# The median of this many steps is the expected time of the next one.
_NUM_TIMES = 5


class StepTimes:
    """Durations of the most recent steps of one size."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._factor = 1.0

    @property
    def expected_s(self) -> float:
        return self._factor * statistics.median(self._recent_s)

    def record(self, took_s: float) -> None:
        self._recent_s.append(took_s)
        self._factor = 1.0

    def age(self, factor: float) -> None:
        """Lowers the expected time, until it is measured again."""
        self._factor *= factor


def round_up(count: int) -> int:
    """The next power of two. Steps of about the same size have about the same duration."""
    return 1 << (count - 1).bit_length()
