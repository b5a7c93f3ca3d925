"""`DraftPacer`: decides how many drafts the next step verifies, from measured times."""

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from paxkv.runner.drafters.step_times import StepTimes, round_up
from paxkv.runner.shapes.bucket_sizes import MIN_VERIFIED_TOKENS

# The expected time of steps that are not chosen falls with every decision until it is measured, so
# that they are tried again. The first factor applies to verifying steps while the engine runs
# ahead. The second applies to steps without drafts while the engine waits for tokens.
_VERIFY_AGING, _PLAIN_AGING = 0.998, 0.9995
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
    smaller size, or else as a step without drafts. So each size is tried once.

    Args:
        clock: Returns seconds; it never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_fetch_s: float | None = None
        # By rounded number of requests: seconds of a decode step.
        self._plain_times: dict[int, StepTimes] = {}
        # (rounded number of requests, rounded sum of requests and drafts, or 0 without drafts) ->
        # seconds of a step while the engine waits.
        self._waiting_times: dict[tuple[int, int], StepTimes] = {}
        # Tokens and seconds of the average step while the engine waits.
        self._waiting_tokens, self._waiting_s = 0.0, 0.0
        # The last decisions: whether the engine runs ahead. The steps in flight after a change were
        # decided before it, so their times belong to neither way.
        self._is_ahead: deque[bool] = deque([True], maxlen=2)

    def record_step(
        self,
        *,
        num_reqs: int,
        num_drafts: int,
        num_drawn: int,
        num_decode_steps: int,
        is_decode: bool,
    ) -> None:
        """Records that the tokens of a step were fetched just now.

        Args:
            num_drawn: Tokens that its requests got.
            is_decode: Whether every request computed only its last token, and drafts if any.
                Models with states also compute again the drafts that the step before accepted.
                These tokens do not change the step's size, so their time is a cost of the drafts.
        """
        now_s = self._clock()
        last_s, self._last_fetch_s = self._last_fetch_s, now_s
        # The engine was busy since the last fetch, because all requests had a step before this one.
        if last_s is None or not is_decode:
            return
        took_s = now_s - last_s
        if all(self._is_ahead):
            times = self._plain_times.setdefault(round_up(num_reqs), StepTimes())
            times.record(took_s / num_decode_steps, num_decode_steps)
        elif not any(self._is_ahead):
            size = _round_tokens(num_reqs + num_drafts) if num_drafts else 0
            times = self._waiting_times.setdefault((round_up(num_reqs), size), StepTimes())
            times.record(took_s)
            self._waiting_tokens += _STEP_WEIGHT * (num_drawn - self._waiting_tokens)
            self._waiting_s += _STEP_WEIGHT * (took_s - self._waiting_s)

    def choose(
        self,
        num_reqs: int,
        proposals: Mapping[str, Sequence[int]],
        rates: Mapping[str, float],
    ) -> DraftChoice:
        """Chooses how to go on after the step that was recorded last.

        Args:
            num_reqs: Requests that decode in the next step.
            proposals: The drafter's tokens for some of them.
            rates: For the same requests, the probability that a draft is right.
        """
        plain = self._plain_times.get(round_up(num_reqs))
        if plain is None:
            return self._run_ahead()
        plain_rate = num_reqs / plain.expected_s
        # The drafts that are most likely right come first. Of a request, this is its first draft.
        ranked = sorted(
            (
                (rates[req_id] ** (1 + place), req_id)
                for req_id, token_ids in proposals.items()
                for place in range(len(token_ids))
            ),
            reverse=True,
        )
        best_rate, num_best = plain_rate, 0
        for num_drafts, gain in _gains_by_size(num_reqs, [gain for gain, _ in ranked]):
            took_s = self._expected_s(num_reqs, num_drafts, plain)
            if (num_reqs + gain) / took_s > best_rate:
                best_rate, num_best = (num_reqs + gain) / took_s, num_drafts
        if num_best:
            if all(self._is_ahead):
                # Start from the expectation, because nothing was measured while running ahead.
                self._waiting_s = self._expected_s(num_reqs, num_best, plain)
                self._waiting_tokens = best_rate * self._waiting_s
            self._is_ahead.append(False)
            plain.age(_PLAIN_AGING)
            counts = Counter(req_id for _, req_id in ranked[:num_best])
            drafts = {r: list(proposals[r][:num_drafts]) for r, num_drafts in counts.items()}
            return DraftChoice(drafts=drafts, is_ahead=False)
        is_waiting = not self._is_ahead[-1]
        if is_waiting and self._waiting_tokens > plain_rate * self._waiting_s:
            self._is_ahead.append(False)
            plain.age(_PLAIN_AGING)
            return DraftChoice(drafts={}, is_ahead=False)
        if ranked:
            for (size, _), times in self._waiting_times.items():
                if size == round_up(num_reqs):
                    times.age(_VERIFY_AGING)
        return self._run_ahead()

    def _run_ahead(self) -> DraftChoice:
        self._is_ahead.append(True)
        return DraftChoice(drafts={}, is_ahead=True)

    def _expected_s(self, num_reqs: int, num_drafts: int, plain: StepTimes) -> float:
        size, size_reqs = _round_tokens(num_reqs + num_drafts), round_up(num_reqs)
        times = self._waiting_times.get((size_reqs, size))
        if times is not None:
            return times.expected_s
        smaller = (
            times.expected_s
            for (known_reqs, known_size), times in self._waiting_times.items()
            if known_reqs == size_reqs and known_size < size
        )
        return max(smaller, default=plain.expected_s)


def _gains_by_size(num_reqs: int, gains: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yields the most drafts that fit each size of a step, and the tokens that they should gain.

    Example: 14 requests with gains [.9, .5, .1] -> 2 drafts with 1.4, in a step of 16 tokens; and
    3 drafts with 1.5, in one of 32.
    """
    num_drafts = 0
    while num_drafts < len(gains):
        size = _round_tokens(num_reqs + num_drafts + 1)
        num_drafts = min(size - num_reqs, len(gains))
        yield num_drafts, sum(gains[:num_drafts])


def _round_tokens(num_tokens: int) -> int:
    return max(MIN_VERIFIED_TOKENS, round_up(num_tokens))
