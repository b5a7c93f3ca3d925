"""`StepWatch`: notices a step that takes too long, from what an engine counts."""


class StepWatch:
    """Adds up for how long a count has stood within one and the same step.

    Only the time between its own looks counts, and of each no more than `MAX_BETWEEN_LOOKS`
    periods: a machine that slept, or a container that was frozen, has had no time for its step.

    Args:
        limit_s: Of a step; 0 is none.
    """

    # The loop that looks may be late.
    MAX_BETWEEN_LOOKS = 2.0

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        # How often to look: a step that hangs is found a tenth late at most.
        self.period_s = min(limit_s / 10, 1.0)
        self._count = 0
        self._last_look_s = 0.0
        self._age_s = 0.0

    def is_too_long(self, count: int, now_s: float) -> bool:
        """Whether the step in which `StepCounter.count` stands has passed its limit."""
        between_s = min(now_s - self._last_look_s, self.MAX_BETWEEN_LOOKS * self.period_s)
        self._last_look_s = now_s
        if count != self._count or count % 2 == 0:
            # Another step than at the last look, or none.
            self._count, self._age_s = count, 0.0
            return False
        self._age_s += between_s
        return self.limit_s > 0 and self._age_s >= self.limit_s

    def start_over(self) -> None:
        """For the count of another engine."""
        self._count, self._age_s = 0, 0.0
