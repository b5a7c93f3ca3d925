"""`DepthPacer`: decides how many drafts a head proposes for each request, from measured times."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from paxkv.runner.drafters.step_times import StepTimes, round_up

# An expected time falls with every decision until it is measured again, so that its way is tried
# again. The first factor applies to steps with drafts while the engine runs ahead. The second
# applies to steps without drafts. It is closer to 1, because the head has no keys and values of
# tokens that were computed without it, so the next drafts are worse.
_DRAFT_AGING, _PLAIN_AGING = 0.999, 0.9998
# Drafts must promise to be faster by this factor. Measured times vary, and useless drafts must not
# be verified because of that.
_MIN_GAIN = 1.05
# Fewer steps without drafts do not tell their time.
_MIN_PLAIN_STEPS = 3


class DepthPacer:
    """Chooses the number of drafts with the most expected tokens per second.

    With drafts, the engine waits for the tokens of each step. Without them, it runs ahead: it
    decides steps before it has their tokens, and bursts of several. The head does not run then,
    except after steps with prompts, where it proposes one draft to measure the acceptance.

    The engine's first steps with a number of requests run ahead, so that their time is known. A
    number of drafts whose time is unknown is expected to take as long as the slowest known smaller
    number, or else as a step without drafts. So each number is tried, soon if many drafts are
    right. A step with drafts cannot be faster than one without them.

    Args:
        max_drafts: Most drafts of a request.
        clock: Returns seconds; it never goes back.

    Attributes:
        num_drafts: The last choice; 0 while the engine runs ahead.
    """

    def __init__(self, max_drafts: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_drafts = max_drafts
        self._clock = clock
        self._last_fetch_s: float | None = None
        # By rounded number of requests: seconds of a decode step, and how many were measured.
        self._plain_times: dict[int, StepTimes] = {}
        self._num_plain_steps: dict[int, int] = {}
        # By rounded number of requests, and of drafts for each.
        self._draft_times: dict[tuple[int, int], StepTimes] = {}
        # The last choices. The steps in flight after a change were decided before it, so their
        # times belong to neither way.
        self._choices: deque[int] = deque([0], maxlen=2)

    @property
    def num_drafts(self) -> int:
        return self._choices[-1]

    def record_step(
        self, *, num_reqs: int, num_drafts: int, num_decode_steps: int, is_decode: bool
    ) -> None:
        """Records that the tokens of a step were fetched just now.

        Args:
            num_drafts: Drafts that it verified and that the head then proposed, for each request.
            is_decode: Whether every request computed only its last token, and drafts if any.
        """
        now_s = self._clock()
        last_s, self._last_fetch_s = self._last_fetch_s, now_s
        # The engine was busy since the last fetch, because all requests had a step before this one.
        if last_s is None or not is_decode:
            return
        took_s, size = now_s - last_s, round_up(num_reqs)
        if not any(self._choices) and num_drafts == 0:
            self._plain_times.setdefault(size, StepTimes()).record(took_s / num_decode_steps)
            num_known = self._num_plain_steps.get(size, 0)
            self._num_plain_steps[size] = num_known + num_decode_steps
        elif all(self._choices) and num_drafts > 0:
            self._draft_times.setdefault((size, num_drafts), StepTimes()).record(took_s)

    def choose(self, rates: Sequence[float]) -> int:
        """Chooses the number of drafts of each request after the step that was recorded last.

        Args:
            rates: For each decoding request, the probability that a draft is right if the drafts
                before it are.
        """
        size = round_up(len(rates))
        num_drafts = 0
        if self._num_plain_steps.get(size, 0) >= _MIN_PLAIN_STEPS:
            num_drafts = self._find_best(rates, size)
            if num_drafts:
                self._plain_times[size].age(_PLAIN_AGING)
            else:
                for (known_size, _), times in self._draft_times.items():
                    if known_size == size:
                        times.age(_DRAFT_AGING)
        self._choices.append(num_drafts)
        return num_drafts

    def _find_best(self, rates: Sequence[float], size: int) -> int:
        plain_s = slowest_s = self._plain_times[size].expected_s
        num_tokens = float(len(rates))
        best, best_rate = 0, _MIN_GAIN * num_tokens / plain_s
        for num_drafts in range(1, self._max_drafts + 1):
            # A request's second draft promises less than its first.
            num_tokens += sum(rate**num_drafts for rate in rates)
            times = self._draft_times.setdefault((size, num_drafts), StepTimes())
            took_s = times.expected_at_least(plain_s if times.is_known else slowest_s)
            slowest_s = max(slowest_s, took_s)
            if num_tokens / took_s > best_rate:
                best, best_rate = num_drafts, num_tokens / took_s
        return best
