"""`StepWatch`: detects an engine that makes no progress, from its step counter."""


class StepWatch:
    """Measures for how long the step counter of an engine with work has not changed.

    An engine has work if its count is odd, or if a message was sent to it since the count last
    changed. The second case covers an engine that does not wake up.

    Each check adds the time since the previous check, but at most `MAX_PERIODS_PER_CHECK` periods.
    So time in which the machine or the container was suspended hardly counts.

    Args:
        limit_s: Seconds for a step, or for waking up; 0 is no limit.
    """

    # Above 1, because the loop that checks may be late.
    MAX_PERIODS_PER_CHECK = 2.0

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        # Seconds between checks: a hanging step is detected after at most 1.1 times the limit.
        self.period_s = min(limit_s / 10, 1.0)
        self._count = 0
        # Messages that had been sent when the count last changed.
        self._num_sent = 0
        self._last_check_s = 0.0
        self._age_s = 0.0

    def is_too_long(self, count: int, num_sent: int, now_s: float) -> bool:
        """True if the engine has made no progress for at least `limit_s` seconds.

        Args:
            count: `StepCounter.count`.
            num_sent: Number of messages that were sent to the engine.
        """
        between_s = min(now_s - self._last_check_s, self.MAX_PERIODS_PER_CHECK * self.period_s)
        self._last_check_s = now_s
        if count != self._count:
            self._count, self._num_sent, self._age_s = count, num_sent, 0.0
            return False
        if count % 2 == 0 and num_sent == self._num_sent:
            return False
        self._age_s += between_s
        return self.limit_s > 0 and self._age_s >= self.limit_s

    def start_over(self) -> None:
        """Resets the watch for another engine."""
        self._count = self._num_sent = 0
        self._age_s = 0.0
