"""`DraftBudget`: limits what drafts cost, by the measured time and tokens of all steps."""

from collections import deque

from paxkv.runner.drafters.step_times import round_up

# Drafts stop when they have cost this share of the time, and go on at half of it.
_MAX_SHARE = 0.03
# In sums over all steps, each newer step multiplies the weight of older ones by this factor.
_DECAY = 0.999
# Number of the latest steps without drafts, whose average time is compared with steps with drafts.
_NUM_TIMES = 64
# How many of these steps are kept when steps without drafts are measured again after drafts.
_NUM_OLD_TIMES = 24
# Time that drafts gained makes up for later losses, up to this share of the time.
_MAX_CREDIT_SHARE = 0.01


class DraftBudget:
    """Compares the time of steps with drafts with that of the same tokens without drafts.

    It uses only measured times, so drafts cost little even if a pacer expects too much of them.

    Attributes:
        is_spent: Drafts have cost too much, so none should be verified now.
    """

    def __init__(self) -> None:
        # By rounded number of requests: seconds of a step without drafts, and number of steps.
        self._plain_times: dict[int, deque[tuple[float, int]]] = {}
        self._is_drafting = False
        # Sums over all steps.
        self._total_s = self._lost_s = 0.0
        self.is_spent = False

    def record_plain(self, num_reqs: int, took_s: float, num_steps: int) -> None:
        """Records a step without drafts, or a burst, while the engine runs ahead."""
        times = self._plain_times.setdefault(round_up(num_reqs), deque())
        if self._is_drafting:
            self._is_drafting = False
            _drop_old(times, _NUM_OLD_TIMES)
        times.append((took_s / num_steps, num_steps))
        _drop_old(times, _NUM_TIMES)
        self._add(took_s, 0.0, num_steps)

    def record_drafting(self, num_reqs: int, took_s: float, num_drawn: int) -> None:
        """Records a step of an engine that waits for the tokens of each step.

        The first step after the engine stopped waiting is recorded here too.
        """
        self._is_drafting = True
        times = self._plain_times.get(round_up(num_reqs))
        if times is None:
            return
        plain_s = sum(s * num for s, num in times) / sum(num for _, num in times)
        expected_s = plain_s * num_drawn / num_reqs
        self._add(took_s, took_s - expected_s, 1)

    def _add(self, took_s: float, lost_s: float, num_steps: int) -> None:
        decay = _DECAY**num_steps
        self._total_s = decay * self._total_s + took_s
        lost_s += decay * self._lost_s
        self._lost_s = max(lost_s, -_MAX_CREDIT_SHARE * self._total_s)
        share = _MAX_SHARE * (0.5 if self.is_spent else 1.0)
        self.is_spent = self._lost_s > share * self._total_s


def _drop_old(times: deque[tuple[float, int]], num_steps: int) -> None:
    while times and sum(num for _, num in times) - times[0][1] >= num_steps:
        times.popleft()
