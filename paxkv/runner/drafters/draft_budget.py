"""`DraftBudget`: limits what drafts cost, by the measured time and tokens of all steps."""

import itertools
import statistics
from collections import deque

from paxkv.runner.drafters.step_times import round_up

# Drafts stop when they have cost this share of the time, and go on at half of it.
_MAX_SHARE = 0.03
# The budget is a share of the time of at least this many steps without drafts, so that drafts are
# tried early.
_MIN_STEPS = 60
# In sums over all steps, each newer step multiplies the weight of older ones by this factor.
_DECAY = 0.999
# The time of a step that also computes prompts says little about drafts, so it is not measured.
# After this many such steps with drafts, no drafts are verified until a step is measured.
_MAX_UNMEASURED = 2
# Number of the latest steps without drafts, whose average time is compared with steps with drafts.
_NUM_TIMES = 64
# How many of these steps are kept when steps without drafts are measured again after drafts.
_NUM_OLD_TIMES = 24
# Time that drafts gained makes up for later losses, up to this share of the time.
_MAX_CREDIT_SHARE = 0.01
# A step that takes longer than this many times the median counts as this many medians. Another
# process may have had the processor.
_MAX_MEDIANS = 4.0
# The median time of steps with drafts of one size is that of this many of the latest ones.
_NUM_DRAFT_TIMES = 9


class DraftBudget:
    """Compares the time of steps with drafts with that of the same tokens without drafts.

    It uses only measured times, so drafts cost little even if a pacer expects too much of them. A
    step that takes unusually long counts only in part, so a single one does not stop drafts.

    Attributes:
        is_spent: Drafts have cost too much, so none should be verified now.
    """

    def __init__(self) -> None:
        # By rounded number of requests.
        self._plain_times: dict[int, _PlainTimes] = {}
        # By rounded numbers of requests and of rows of a step with drafts: its seconds.
        self._draft_times: dict[tuple[int, int], deque[float]] = {}
        self._is_drafting = False
        # Steps with drafts and prompts since the last measured step.
        self._num_unmeasured = 0
        # Sums over all steps. `_prompts_s` is the time of a head's runs over prompts, less the time
        # that drafts gained since then.
        self._total_s = self._lost_s = self._prompts_s = 0.0
        # Time of `_MIN_STEPS` steps without drafts with as many requests as the last step.
        self._min_total_s = 0.0
        self.is_spent = False

    def record_plain(self, num_reqs: int, took_s: float, num_steps: int) -> None:
        """Records a step without drafts, or a burst, while the engine runs ahead."""
        self._num_unmeasured = 0
        times = self._plain_times.setdefault(round_up(num_reqs), _PlainTimes())
        if self._is_drafting:
            self._is_drafting = False
            times.drop_old()
        times.record(took_s / num_steps, num_steps)
        self._add(times.average_s, min(took_s, num_steps * times.most_s), 0.0, num_steps)

    def record_drafting(
        self, num_reqs: int, took_s: float, num_drawn: int, *, num_rows: int, num_steps: int = 1
    ) -> None:
        """Records a step of an engine that waits for the tokens of each step, or a burst.

        The first step after the engine stopped waiting is recorded here too.

        Args:
            num_rows: Tokens that a step computes, including drafts.
        """
        self._is_drafting = True
        self._num_unmeasured = 0
        plain_s = self.plain_s(num_reqs)
        if plain_s is None:
            return
        size = round_up(num_reqs), round_up(num_rows)
        times = self._draft_times.setdefault(size, deque(maxlen=_NUM_DRAFT_TIMES))
        most_s = self.most_s(num_reqs, num_rows)
        if len(times) > 1:
            most_s = _MAX_MEDIANS * statistics.median_low(times)
        times.append(took_s / num_steps)
        took_s = min(took_s, num_steps * most_s)
        self._add(plain_s, took_s, took_s - plain_s * num_drawn / num_reqs, num_steps)

    def record_unmeasured(self) -> None:
        """Records a step whose time is not measured: it verified drafts and computed prompts."""
        self._num_unmeasured += 1

    def record_prompts(self, head_s: float) -> None:
        """Records that a head computed prompts."""
        self._prompts_s += head_s

    def plain_s(self, num_reqs: int) -> float | None:
        """The average time of a step without drafts; None if it was not measured."""
        times = self._plain_times.get(round_up(num_reqs))
        return None if times is None else times.average_s

    def most_s(self, num_reqs: int, num_rows: int) -> float:
        """The longest time that is assumed for a step of unknown time.

        With n rows per request, it is the time of n + 1 steps without drafts. It is infinite if no
        step without drafts was measured.
        """
        plain_s = self.plain_s(num_reqs)
        return float("inf") if plain_s is None else plain_s * (1 + num_rows / num_reqs)

    def affordable_s(self, num_reqs: int, num_expected: float) -> float:
        """The time that a step or burst may take if it draws `num_expected` tokens."""
        plain_s = self.plain_s(num_reqs)
        if plain_s is None:
            return 0.0
        most_s = _MAX_SHARE * max(self._total_s, _MIN_STEPS * plain_s)
        return plain_s * num_expected / num_reqs + most_s - self._lost_s

    def affords_rows(self, num_reqs: int, num_rows: int, num_expected: float) -> bool:
        """Whether a step that computes `num_rows` tokens may be tried while its time is unknown."""
        affordable_s = self.affordable_s(num_reqs, num_expected)
        return self.most_s(num_reqs, num_rows) <= affordable_s

    @property
    def affords_drafts(self) -> bool:
        """Whether the next step may verify drafts."""
        return not self.is_spent and self._num_unmeasured < _MAX_UNMEASURED

    @property
    def affords_prompts(self) -> bool:
        """Whether a head may compute prompts."""
        most_s = _MAX_SHARE * max(self._total_s, self._min_total_s)
        return not self.is_spent and self._prompts_s + max(self._lost_s, 0.0) <= most_s

    def _add(self, plain_s: float, took_s: float, lost_s: float, num_steps: int) -> None:
        decay = _DECAY**num_steps
        self._total_s = decay * self._total_s + took_s
        self._min_total_s = _MIN_STEPS * plain_s
        self._prompts_s = max(0.0, decay * self._prompts_s + min(lost_s, 0.0))
        lost_s += decay * self._lost_s
        self._lost_s = max(lost_s, -_MAX_CREDIT_SHARE * self._total_s)
        share = _MAX_SHARE * (0.5 if self.is_spent else 1.0)
        self.is_spent = self._lost_s > share * max(self._total_s, self._min_total_s)


class _PlainTimes:
    """The latest steps without drafts of one size.

    Attributes:
        average_s: Their average time. A time above `most_s` counts as `most_s`.
    """

    def __init__(self) -> None:
        # Seconds of a step, and how many steps were measured together.
        self._times: deque[tuple[float, int]] = deque()
        self._num_steps = self._num_new = 0
        self.average_s = self.most_s = 0.0

    def record(self, took_s: float, num_steps: int) -> None:
        self._times.append((took_s, num_steps))
        self._num_steps += num_steps
        self._drop_until(_NUM_TIMES)
        self._num_new += 1
        # Both are computed again only when an eighth of the times is new. Steps may be short, so a
        # sum over many times in each step would cost too much.
        if 8 * self._num_new > len(self._times):
            self._num_new = 0
            self.most_s = _MAX_MEDIANS * self._median_s()
            total_s = sum(min(took_s, self.most_s) * num for took_s, num in self._times)
            self.average_s = total_s / self._num_steps

    def drop_old(self) -> None:
        """Drops all but the latest `_NUM_OLD_TIMES` steps.

        `record` then computes the average again at once, so that it includes the next time.
        """
        self._drop_until(_NUM_OLD_TIMES)
        self._num_new = len(self._times)

    def _drop_until(self, num_kept: int) -> None:
        """Drops the oldest times while at least `num_kept` steps remain."""
        while self._times and self._num_steps - self._times[0][1] >= num_kept:
            self._num_steps -= self._times.popleft()[1]

    def _median_s(self) -> float:
        times = sorted(self._times)
        ends = itertools.accumulate(num_steps for _, num_steps in times)
        ordered = zip(times, ends, strict=True)
        return next(took_s for (took_s, _), end in ordered if 2 * end >= self._num_steps)
