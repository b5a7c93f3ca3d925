"""`DraftPacer`: decides how many drafts the next step verifies, from measured times."""

import bisect
import dataclasses
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from paxkv.runner.drafters.draft_budget import DraftBudget
from paxkv.runner.drafters.step_times import MIN_TIMES, StepTimes, round_up
from paxkv.runner.shapes.bucket_sizes import MIN_VERIFIED_TOKENS

# The expected time of steps that are not chosen falls with every decision until it is measured, so
# that they are tried again. The first factor applies to verifying steps while the engine runs
# ahead. The second applies to steps without drafts while the engine waits for tokens.
_VERIFY_AGING, _PLAIN_AGING = 0.998, 0.999
# While the engine runs ahead, drafts are chosen only if the expected gain is at least this factor.
# Measured times vary, and a smaller gain may be chance.
_MIN_GAIN = 1.05
# The engine then runs ahead for at least this many steps, because one may take unusually long.
_MIN_AHEAD = 8
# Weight of a step in the throughput with drafts.
_STEP_WEIGHT = 1 / 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    """What the engine does next.

    Args:
        drafts: Request id -> tokens that its next step verifies.
        is_ahead: The engine may decide steps before it has the tokens of the steps before them.
    """

    drafts: dict[str, list[int]]
    is_ahead: bool


class DraftPacer:
    """Chooses between three ways to go on after a step, by their expected tokens per second.

    - The next step verifies drafts. The engine decides it when it has the tokens of this one.
    - The next step verifies nothing, but the engine still waits, because drafts are likely soon.
    - The engine runs ahead: it decides steps before it has their tokens, and bursts of several.

    The engine's first steps with a number of requests run ahead, so that their time is known. A
    verifying step of unknown size is expected to take as long as the slowest known step of a
    smaller size, or else as a step without drafts. So each size is tried, with as many drafts as
    the `DraftBudget` affords to lose. While the budget affords no drafts, the engine runs ahead.

    Models with states compute accepted drafts again in the next step. The expected time is
    therefore that of a larger step: it has one more token for each draft that should be right.

    Args:
        clock: Returns seconds; it never goes back. See `Platform.step_clock`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_fetch_s: float | None = None
        self._budget = DraftBudget()
        # By rounded number of requests: seconds of a decode step.
        self._plain_times: dict[int, StepTimes] = {}
        # (rounded number of requests, rounded number of tokens, or 0 without drafts) -> seconds of
        # a step while the engine waits.
        self._waiting_times: dict[tuple[int, int], StepTimes] = {}
        # Tokens and seconds of the average step while the engine waits.
        self._waiting_tokens, self._waiting_s = 0.0, 0.0
        # The last decisions: whether the engine runs ahead. The steps in flight after a change were
        # decided before it, so their times belong to neither way.
        self._is_ahead: deque[bool] = deque([True], maxlen=2)
        # Steps that the engine should still run ahead, so that several are measured.
        self._num_ahead = 0
        # Whether the model computes accepted drafts again.
        self._recomputes = False

    def record_step(
        self,
        *,
        num_reqs: int,
        num_drafts: int,
        num_recomputed: int = 0,
        num_drawn: int,
        num_decode_steps: int,
        is_decode: bool,
    ) -> None:
        """Records that the tokens of a step were fetched just now.

        Args:
            num_recomputed: Drafts that the step before accepted and this step computed again.
            num_drawn: Tokens that its requests got.
            is_decode: Whether every request computed only its last token, drafts, and tokens of
                `num_recomputed`.
        """
        now_s = self._clock()
        last_s, self._last_fetch_s = self._last_fetch_s, now_s
        # The engine was busy since the last fetch, because all requests had a step before this one.
        if last_s is None or not is_decode:
            if num_drafts > 0:
                self._budget.record_unmeasured()
            return
        took_s = now_s - last_s
        self._recomputes |= num_recomputed > 0
        if all(self._is_ahead) and num_recomputed == 0:
            times = self._plain_times.setdefault(round_up(num_reqs), StepTimes())
            times.record(took_s / num_decode_steps, num_decode_steps)
            self._budget.record_plain(num_reqs, took_s, num_decode_steps)
            self._num_ahead -= num_decode_steps
            return
        num_rows = num_reqs + num_drafts + num_recomputed
        if not self._is_ahead[0]:
            self._budget.record_drafting(num_reqs, took_s, num_drawn, num_rows=num_rows)
        if not any(self._is_ahead):
            size = _round_tokens(num_rows) if num_drafts else 0
            times = self._waiting_times.setdefault((round_up(num_reqs), size), StepTimes())
            times.record(took_s)
            self._waiting_tokens += _STEP_WEIGHT * (num_drawn - self._waiting_tokens)
            self._waiting_s += _STEP_WEIGHT * (took_s - self._waiting_s)

    def may_draft(self, num_reqs: int) -> bool:
        """Whether `choose` considers proposals. If not, the engine runs ahead."""
        plain = self._plain_times.get(round_up(num_reqs))
        is_known = plain is not None and plain.num_measured >= MIN_TIMES
        return is_known and self._num_ahead <= 0 and self._budget.affords_drafts

    def choose(
        self,
        num_reqs: int,
        proposals: Mapping[str, Sequence[int]],
        chances: Mapping[str, Sequence[float]],
    ) -> DraftChoice:
        """Chooses how to go on after the step that was recorded last.

        Args:
            num_reqs: Requests that decode in the next step.
            proposals: The drafter's tokens for some of them.
            chances: For each of these tokens, the probability that this token and the tokens of
                the proposal before it are right.
        """
        if not self.may_draft(num_reqs):
            return self._run_ahead()
        plain = self._plain_times[round_up(num_reqs)]
        plain_rate = num_reqs / plain.expected_s
        # The drafts that are most likely right come first. Drafts of one request stay in order.
        ranked = sorted(
            (
                (chance, -place, req_id)
                for req_id, token_ids in proposals.items()
                for place, chance in enumerate(chances[req_id][: len(token_ids)])
            ),
            reverse=True,
        )
        is_waiting = not self._is_ahead[-1]
        best_rate, num_best = plain_rate * (1.0 if is_waiting else _MIN_GAIN), 0
        gains = [chance for chance, _, _ in ranked]
        for num_drafts, gain, size in self._gains_by_size(num_reqs, gains):
            rate = (num_reqs + gain) / self._expected_s(num_reqs, size, plain)
            if rate > best_rate:
                best_rate, num_best = rate, num_drafts
        if num_best:
            if all(self._is_ahead):
                # Start from the expectation, because nothing was measured while running ahead.
                self._waiting_tokens, self._waiting_s = best_rate, 1.0
            self._is_ahead.append(False)
            plain.age(_PLAIN_AGING)
            counts = Counter(req_id for _, _, req_id in ranked[:num_best])
            drafts = {r: list(proposals[r][:num_drafts]) for r, num_drafts in counts.items()}
            return DraftChoice(drafts=drafts, is_ahead=False)
        if is_waiting and self._waiting_tokens > plain_rate * self._waiting_s:
            self._is_ahead.append(False)
            plain.age(_PLAIN_AGING)
            return DraftChoice(drafts={}, is_ahead=False)
        if is_waiting:
            self._num_ahead = _MIN_AHEAD
        if ranked:
            for (size, _), times in self._waiting_times.items():
                if size == round_up(num_reqs):
                    times.age(_VERIFY_AGING)
        return self._run_ahead()

    def _run_ahead(self) -> DraftChoice:
        self._is_ahead.append(True)
        return DraftChoice(drafts={}, is_ahead=True)

    def _expected_s(self, num_reqs: int, size: int, plain: StepTimes) -> float:
        size_reqs = round_up(num_reqs)
        times = self._waiting_times.get((size_reqs, size))
        if times is not None and times.is_known:
            return times.expected_s
        smaller = (
            times.expected_s
            for (known_reqs, known_size), times in self._waiting_times.items()
            if known_reqs == size_reqs and known_size < size and times.is_known
        )
        return max(smaller, default=plain.expected_s)

    def _gains_by_size(
        self, num_reqs: int, gains: Sequence[float]
    ) -> Iterator[tuple[int, float, int]]:
        """Yields the most drafts that fit each size of a step, their gain in tokens, and the size.

        Example: 14 requests with gains [.9, .5, .1] -> 2 drafts with 1.4, in a step of 16 tokens;
        and 3 drafts with 1.5, in one of 32. A size that was not measured has no more drafts than
        the budget affords.
        """
        sums = [0.0, *itertools.accumulate(gains)]
        tokens = [
            num_reqs + num_drafts + math.ceil(gain * self._recomputes)
            for num_drafts, gain in enumerate(sums)
        ]
        num_drafts = 0
        while num_drafts < len(gains):
            num_smaller, size = num_drafts, _round_tokens(tokens[num_drafts + 1])
            num_drafts = num_tried = bisect.bisect_right(tokens, size) - 1
            times = self._waiting_times.get((round_up(num_reqs), size))
            if times is None or not times.is_known:
                # A binary search for the most drafts that the budget affords. It affords fewer
                # drafts too, because each draft adds no more expected tokens than rows.
                num_tried = bisect.bisect_left(
                    range(num_drafts),
                    True,
                    lo=num_smaller,
                    key=lambda num: (
                        not self._budget.affords_rows(
                            num_reqs, tokens[num + 1], num_reqs + sums[num + 1]
                        )
                    ),
                )
            if num_tried > num_smaller:
                yield num_tried, sums[num_tried], size


def _round_tokens(num_tokens: int) -> int:
    return max(MIN_VERIFIED_TOKENS, round_up(num_tokens))
