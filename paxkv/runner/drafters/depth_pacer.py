"""`DepthPacer`: decides how many drafts a head proposes for each request, from measured times."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from paxkv.runner.drafters.draft_budget import DraftBudget
from paxkv.runner.drafters.step_times import MIN_TIMES, StepTimes, round_up

# The pacer decides between drafts and no drafts. Each decision lowers the expected time of the
# other choice, so that the pacer tries this choice again later and measures it. The first factor is
# for times of steps with drafts, the second for times of steps without them. The second is closer
# to 1: steps without drafts cost more than their time, because the head has no keys and values of
# their tokens, so later drafts are worse.
_DRAFT_AGING, _PLAIN_AGING = 0.998, 0.9998
# Drafts are chosen only if their expected gain is at least the first factor, and another number of
# drafts only if it gains the second. Measured times vary, and a smaller gain may be chance.
_MIN_GAIN, _MIN_DEPTH_GAIN = 1.05, 1.03
# While the engine runs ahead, the pacer chooses again after at least this many steps, because one
# may take unusually long, and because a choice takes time.
_MIN_AHEAD = 16
# While drafts do not pay, the head computes the prompts of one in this many steps that start
# requests.
STEPS_PER_TRIAL = 32
# In sums over all steps, each newer step multiplies the weight of older ones by this factor.
_DECAY = 0.98
# Weight of the newest step in the share of expected tokens.
_SHARE_WEIGHT = 0.05


class DepthPacer:
    """Chooses the number of drafts with the most expected tokens per second.

    With drafts, the engine waits for the tokens of each step. Without drafts, it runs ahead: it
    decides the next step before it has the tokens of the last one, and runs bursts of steps. While
    it runs ahead, the head runs only after some steps with prompts (`tries_prompts`), where it
    proposes one draft to measure the acceptance. While the `DraftBudget` affords no drafts, the
    engine runs ahead.

    For each number of requests, the engine runs the first steps without drafts to measure their
    time. A number of drafts whose time is unknown is expected to take as long as the slowest
    smaller number, or else as a step without drafts. So each number is tried when the budget
    affords wrong drafts, sooner if more drafts are right. A step with drafts is never expected to
    be faster than one without them. The head's run over prompts counts too, in proportion to the
    prompt tokens per drawn token: short answers to long prompts need more right drafts.

    Args:
        max_drafts: Most drafts of a request.
        clock: Returns seconds; it never goes back. See `Platform.step_clock`.

    Attributes:
        num_drafts: The last choice; 0 while the engine runs ahead.
    """

    def __init__(self, max_drafts: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_drafts = max_drafts
        self._clock = clock
        self._last_fetch_s: float | None = None
        # By rounded number of requests: seconds of a decode step.
        self._plain_times: dict[int, StepTimes] = {}
        # By rounded number of requests, and of drafts for each.
        self._draft_times: dict[tuple[int, int], StepTimes] = {}
        # The last choices. The steps in flight after a change were decided before it, so their
        # times count for neither choice.
        self._choices: deque[int] = deque([0], maxlen=2)
        # When the tokens of the last step were fetched.
        self._tokens_s: float | None = None
        # By rounded number of tokens of a step with prompts: seconds of the head per token.
        self._head_times: dict[int, StepTimes] = {}
        self._last_head_times: StepTimes | None = None
        # Sums over all steps.
        self._num_prompt_tokens = self._num_drawn = 0.0
        # By number of drafts, the tokens that the next step should draw; and the average share of
        # these tokens that steps with drafts have drawn. A request that ends does not get the right
        # drafts after its end.
        self._num_expected: list[float] = [1.0] * (max_drafts + 1)
        self._drawn_share = 1.0
        self._budget = DraftBudget()
        # Steps that the engine should still run ahead.
        self._num_ahead = 0
        # Steps that started requests since the head last computed their prompts.
        self._num_untried = 0

    @property
    def num_drafts(self) -> int:
        return self._choices[-1]

    def record_tokens(self) -> None:
        """Records that the drawn tokens of a step were fetched just now, and no drafts yet."""
        self._tokens_s = self._clock()

    def record_step(
        self,
        *,
        num_reqs: int,
        num_prompt_tokens: int = 0,
        num_drawn: int,
        num_drafts: int,
        num_verified: int | None = None,
        num_decode_steps: int,
        is_decode: bool,
    ) -> None:
        """Records a step whose drafts were fetched just now, or that has none.

        Args:
            num_prompt_tokens: Tokens that the step computed, if it computed prompts; otherwise 0.
            num_drawn: Tokens that the requests got from the step.
            num_drafts: Drafts of each request that the head proposed after the step.
            num_verified: Most drafts of a request that the step verified; by default `num_drafts`.
                If the two numbers differ, the step's time is not used.
            is_decode: Whether every request computed only its last token, and drafts if any.
        """
        now_s = self._clock()
        self._num_drawn = _DECAY * self._num_drawn + num_drawn
        self._num_prompt_tokens *= _DECAY
        if num_prompt_tokens:
            self._num_prompt_tokens += num_prompt_tokens
            if num_drafts and self._tokens_s is not None:
                self._budget.record_prompts(now_s - self._tokens_s)
                times = self._head_times.setdefault(round_up(num_prompt_tokens), StepTimes())
                times.record((now_s - self._tokens_s) / num_prompt_tokens)
                self._last_head_times = times
        last_s, self._last_fetch_s = self._last_fetch_s, now_s
        # Only decode steps are measured. Their requests also had the step before, so the engine was
        # busy since the last fetch.
        if last_s is None or not is_decode:
            if num_verified:
                self._budget.record_unmeasured()
            return
        took_s, size = now_s - last_s, round_up(num_reqs)
        is_measured = num_verified in (None, num_drafts)
        if is_measured and not any(self._choices) and num_drafts == 0:
            self._plain_times.setdefault(size, StepTimes()).record(
                took_s / num_decode_steps, num_decode_steps
            )
            self._budget.record_plain(num_reqs, took_s, num_decode_steps)
            self._num_ahead -= num_decode_steps
            return
        num_rows = num_reqs * (1 + max(num_drafts, num_verified or 0))
        if self._choices[0] and num_rows > num_reqs:
            self._budget.record_drafting(num_reqs, took_s, num_drawn, num_rows=num_rows)
        if all(self._choices) and num_decode_steps == 1:
            if is_measured and num_drafts > 0:
                times = self._draft_times.setdefault((size, num_drafts), StepTimes())
                times.record(took_s)
            # This also counts steps at the end of a request, which may verify fewer drafts. After
            # the choice of more drafts, a step still verifies as many as the choice before.
            num_expected = self._num_expected[min(self._choices)]
            self._drawn_share += _SHARE_WEIGHT * (num_drawn / num_expected - self._drawn_share)

    def choose(self, num_reqs: int, chances: Callable[[], Sequence[Sequence[float]]]) -> int:
        """Chooses the number of drafts of each request after the step that was recorded last.

        Args:
            num_reqs: Requests that decode.
            chances: Returns `Acceptance.chances` of the most drafts, for each of these requests.
                Called only if the choice depends on it.
        """
        size = round_up(num_reqs)
        num_drafts = 0
        is_tried = self._num_ahead <= 0 and self._budget.affords_drafts
        if is_tried and self._is_known(size):
            self._num_expected = self._count_expected(chances())
            num_drafts = self._find_best(self._num_expected, size)
            if num_drafts:
                self._plain_times[size].age(_PLAIN_AGING)
            else:
                self._num_ahead = _MIN_AHEAD
                for (known_size, _), times in self._draft_times.items():
                    if known_size == size:
                        times.age(_DRAFT_AGING)
        self._choices.append(num_drafts)
        return num_drafts

    def tries_prompts(self, num_reqs: int, chances: Sequence[float]) -> bool:
        """Returns whether the head should compute the prompts of requests that start in a step.

        Without it, the head has no keys and values of the prompts, so later drafts are worse. It
        therefore runs if drafts may pay, or else rarely, to notice if they become right more often.

        Args:
            num_reqs: Requests of the step.
            chances: `TotalAcceptance.chances` of the most drafts.
        """
        # More requests may start before these decode, so the next larger measured size is used.
        sizes = sorted(filter(self._is_known, self._plain_times))
        size = next((size for size in sizes if size >= num_reqs), sizes[-1] if sizes else None)
        # The first prompts are tried, to measure the head's time.
        may_pay = self._last_head_times is None
        if size is not None:
            expected = self._count_expected([chances] * size)
            may_pay = self._budget.affords_prompts and self._find_best(expected, size) > 0
        self._num_untried += 1
        if not may_pay and self._num_untried < STEPS_PER_TRIAL:
            return False
        self._num_untried = 0
        return True

    def _is_known(self, size: int) -> bool:
        """Whether the time of steps without drafts is known."""
        times = self._plain_times.get(size)
        return times is not None and times.num_measured >= MIN_TIMES

    def _count_expected(self, chances: Sequence[Sequence[float]]) -> list[float]:
        """Returns the tokens that a step should draw, by its number of drafts."""
        gains = (sum(chance[place] for chance in chances) for place in range(self._max_drafts))
        return [*itertools.accumulate(gains, initial=float(len(chances)))]

    def _find_best(self, num_expected: Sequence[float], size: int) -> int:
        """Returns the best number of drafts."""
        plain_s = slowest_s = self._plain_times[size].expected_s
        num_reqs = num_expected[0]
        rates = [num_reqs / plain_s]
        share, prompt_s = min(1.0, self._drawn_share), self._prompt_s
        # An unknown number of drafts takes at most one step longer than the number before.
        most_s = math.inf
        for num_drafts in range(1, self._max_drafts + 1):
            times = self._draft_times.setdefault((size, num_drafts), StepTimes())
            if times.is_known:
                took_s = times.expected_at_least(plain_s)
                most_s = took_s
            else:
                took_s = times.expected_at_least(slowest_s)
                most_s = min(most_s + plain_s, self._budget.most_s(size, size * (1 + num_drafts)))
                if most_s > self._budget.affordable_s(size, share * num_expected[num_drafts]):
                    break
            slowest_s = max(slowest_s, took_s)
            num_drawn = max(share * num_expected[num_drafts], num_reqs)
            rates.append(num_drawn / (took_s + num_drawn * prompt_s))
        before = self.num_drafts
        best = max(
            range(1, len(rates)),
            key=lambda depth: rates[depth] * (_MIN_DEPTH_GAIN if depth == before else 1.0),
            default=0,
        )
        return best if rates[best] > _MIN_GAIN * rates[0] else 0

    @property
    def _prompt_s(self) -> float:
        """Seconds of the head's run over prompts, for each drawn token."""
        if self._last_head_times is None or self._num_drawn == 0.0:
            return 0.0
        return self._last_head_times.expected_s * self._num_prompt_tokens / self._num_drawn
