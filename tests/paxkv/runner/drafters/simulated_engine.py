"""An engine with drafts, whose step times are drawn from a model of a machine. It computes nothing.

The text of every request is 0, 1, 2, ..., so the token at a position is the position.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.features.head_drafts import HeadStep
from paxkv.runner.shapes.scheduled_rows import ScheduledRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Seconds of a step: `step_s`, `row_s` for each row, and `host_s` if the device was idle.

    Args:
        noise: Standard deviation of the logarithm of a step's time.
        stall_share: Share of the steps that take `stall_factor` times as long, as on a busy
            machine.
    """

    step_s: float
    row_s: float
    host_s: float
    noise: float = 0.25
    stall_share: float = 0.03
    stall_factor: float = 4.0

    def mean_s(self, num_tokens: int, *, num_steps: int = 1, was_idle: bool = False) -> float:
        smallest = 1 if num_tokens == 1 else 8
        num_rows = max(smallest, 1 << (num_tokens - 1).bit_length())
        return num_steps * (self.step_s + self.row_s * num_rows) + self.host_s * was_idle

    def draw_factor(self, rng: random.Random) -> float:
        """The time of a step, divided by its mean."""
        stall = self.stall_factor if rng.random() < self.stall_share else 1.0
        mean = (1.0 + (self.stall_factor - 1.0) * self.stall_share) * math.exp(self.noise**2 / 2)
        return stall * rng.lognormvariate(0.0, self.noise) / mean


@dataclasses.dataclass(slots=True, kw_only=True)
class _Request:
    """One request.

    Args:
        num_known: Tokens that the host has.
        num_own: Tokens, without drafts, that must be computed before the next draw. Above 1 for a
            prompt, and for accepted drafts of a model with states.
        num_wanted: Tokens of the prompt and the answer; infinite if the request never ends.
        num_pending: Tokens that steps in flight draw.
    """

    num_known: int
    num_own: int
    num_wanted: float
    num_pending: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether it has all its tokens, or steps in flight draw the rest."""
        return self.num_known + self.num_pending >= self.num_wanted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StepInFlight:
    """A step whose tokens the host does not have yet.

    Args:
        drafts: The drafts of each request of the step.
        num_draws: Tokens that each request draws, besides right drafts.
    """

    planned: FeatureStep | None
    took_s: float
    proposing_s: float
    drafts: dict[str, list[int]]
    num_draws: dict[str, int]


class SimulatedEngine:
    """Runs requests together.

    Args:
        make_feature: Makes the step feature from a clock. It may return None.
        has_states: A step computes the drafts again that the step before it accepted.
        burst_len: Decode steps of a burst, while the engine does not wait for tokens.
        max_tokens: Most tokens that a step computes.
    """

    def __init__(
        self,
        machine: Machine,
        make_feature: Callable[[Callable[[], float]], StepFeature | None],
        *,
        has_states: bool = False,
        burst_len: int = 1,
        max_tokens: float = math.inf,
        seed: int = 0,
    ) -> None:
        self._machine, self._has_states, self._burst_len = machine, has_states, burst_len
        self._max_tokens = max_tokens
        self._rng = random.Random(seed)
        self.now_s = self.mean_s = 0.0
        self._num_started = 0
        self._requests: dict[str, _Request] = {}
        self._new_ids: list[str] = []
        self._ended_ids: set[str] = set()
        self._in_flight: list[_StepInFlight] = []
        self._drafts: dict[str, list[int]] = {}
        self._feature = make_feature(lambda: self.now_s)

    def _propose(self, step: _StepInFlight) -> dict[str, list[int]]:
        """Drafts that the device proposes after a step."""
        return {}

    def _proposing_s(self, planned: FeatureStep | None) -> float:
        """Seconds for these drafts."""
        return 0.0

    def run(self, num_tokens: int, *, num_reqs: int) -> float:
        """Runs requests that never end, until they have `num_tokens` tokens on average.

        Returns tokens per second, from times without noise.
        """
        start_s = self.mean_s
        req_ids = self._start_requests(num_reqs, num_prompt_tokens=1, num_tokens=math.inf)
        num_known = 0
        while num_known < num_tokens * num_reqs:
            self._step()
            num_known = sum(self._requests[req_id].num_known - 1 for req_id in req_ids)
        return num_known / (self.mean_s - start_s)

    def answer(self, num_tokens: int, *, num_reqs: int, num_prompt_tokens: int) -> float:
        """Answers requests that arrive together, and returns the seconds without noise.

        Args:
            num_tokens: Tokens of each answer.
        """
        start_s = self.mean_s
        self._start_requests(num_reqs, num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens)
        while self._requests or self._in_flight:
            self._step()
        return self.mean_s - start_s

    def _start_requests(
        self, num_reqs: int, *, num_prompt_tokens: int, num_tokens: float
    ) -> list[str]:
        req_ids = [f"r{self._num_started + idx}" for idx in range(num_reqs)]
        self._num_started += num_reqs
        for req_id in req_ids:
            self._requests[req_id] = _Request(
                num_known=num_prompt_tokens,
                num_own=num_prompt_tokens,
                num_wanted=num_prompt_tokens + num_tokens,
            )
        self._new_ids += req_ids
        return req_ids

    def _step(self) -> None:
        is_waiting = bool(self._drafts)
        while len(self._in_flight) < (1 if is_waiting else 2) and not all(
            row.is_complete for row in self._requests.values()
        ):
            self._decide(is_waiting)
        self._fetch(self._in_flight.pop(0))

    def _decide(self, is_waiting: bool) -> None:
        room = self._max_tokens
        rows: dict[str, _Request] = {}
        scheduled: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        for req_id, row in self._requests.items():
            num_own = 0 if row.is_complete else min(row.num_own, room)
            if num_own:
                found = self._drafts.get(req_id, []) if is_waiting else []
                rows[req_id], drafts[req_id] = row, found[: min(len(found), room - num_own)]
                scheduled[req_id] = num_own + len(drafts[req_id])
                room -= scheduled[req_id]
        is_burst = not is_waiting and all(row.num_own == 1 for row in self._requests.values())
        num_left = min(row.num_wanted - row.num_known - row.num_pending for row in rows.values())
        num_steps = min(self._burst_len, num_left) if is_burst else 1
        took_s = self._machine.mean_s(
            sum(scheduled.values()), num_steps=num_steps, was_idle=not self._in_flight
        )
        planned = None
        if self._feature is not None:
            self._report_requests(rows)
            planned = self._feature.plan(_rows_of(rows, scheduled, drafts, num_steps))
        num_draws = {}
        for req_id, row in rows.items():
            row.num_own -= scheduled[req_id] - len(drafts[req_id])
            num_draws[req_id] = num_steps if row.num_own == 0 else 0
            row.num_own += num_draws[req_id] > 0
            row.num_pending += num_draws[req_id]
        self._in_flight.append(
            _StepInFlight(
                planned=planned,
                took_s=took_s,
                proposing_s=self._proposing_s(planned),
                drafts=drafts,
                num_draws=num_draws,
            )
        )

    def _report_requests(self, rows: Mapping[str, _Request]) -> None:
        """Reports which requests started and ended since the last step."""
        started_ids = [req_id for req_id in self._new_ids if req_id in rows]
        self._new_ids = [req_id for req_id in self._new_ids if req_id not in rows]
        ended_ids, self._ended_ids = self._ended_ids, set()
        new_reqs = [
            NewRequestData(
                req_id=req_id,
                prompt_token_ids=[*range(self._requests[req_id].num_known)],
                sampling_params=SamplingParams(),
                block_ids=([1],),
                num_computed_tokens=0,
            )
            for req_id in started_ids
        ]
        self._feature.before_step(
            SchedulerOutput(
                scheduled_new_reqs=new_reqs,
                scheduled_cached_reqs=CachedRequestData(
                    req_ids=[],
                    resumed_req_ids=frozenset(),
                    new_block_ids=[],
                    num_computed_tokens=[],
                    num_output_tokens=[],
                    all_token_ids={},
                ),
                num_scheduled_tokens={},
                total_num_scheduled_tokens=0,
                preempted_req_ids=frozenset(),
                finished_req_ids=frozenset(ended_ids),
            ),
            None,
        )

    def _fetch(self, step: _StepInFlight) -> None:
        self.mean_s += step.took_s + step.proposing_s
        factor = self._machine.draw_factor(self._rng)
        self.now_s += step.took_s * factor
        if step.planned is not None:
            step.planned.record_tokens()
        self.now_s += step.proposing_s * factor
        sampled = []
        for req_id, num_drawn in step.num_draws.items():
            row, drafts = self._requests.get(req_id), step.drafts[req_id]
            if row is None or num_drawn == 0:
                sampled.append([])
                continue
            num_right = 0
            while num_right < len(drafts) and drafts[num_right] == row.num_known + num_right:
                num_right += 1
            sampled.append([*range(row.num_known, row.num_known + num_drawn + num_right)])
            row.num_known += num_drawn + num_right
            row.num_pending -= num_drawn
            row.num_own = 1 + num_right * self._has_states
            if row.num_known >= row.num_wanted:
                del self._requests[req_id]
                self._ended_ids.add(req_id)
        if step.planned is None:
            return
        output = ModelRunnerOutput(
            req_ids=[*step.num_draws],
            sampled_token_ids=sampled,
            logprobs=[None] * len(sampled),
            draft_token_ids=self._propose(step),
        )
        self._drafts = step.planned.finish(output, {}).draft_token_ids


def _rows_of(
    rows: Mapping[str, _Request],
    scheduled: Mapping[str, int],
    drafts: Mapping[str, Sequence[int]],
    num_steps: int,
) -> ScheduledRows:
    numbers = (
        [*scheduled.values()],
        [row.num_known + row.num_pending - row.num_own for row in rows.values()],
        [row.num_known for row in rows.values()],
        [row.num_pending for row in rows.values()],
        [*map(len, drafts.values())],
    )
    scheduled_np, computed_np, known_np, pending_np, drafted_np = (
        np.array(each, np.int32) for each in numbers
    )
    return ScheduledRows(
        [*rows],
        rows_np=np.arange(len(rows), dtype=np.int32),
        num_scheduled_np=scheduled_np,
        num_computed_np=computed_np,
        num_tokens_np=known_np,
        num_pending_np=pending_np,
        num_drafts_np=drafted_np,
        token_ids_np=np.zeros((len(rows), 1), np.int32),
        num_decode_steps=num_steps,
    )


class SimulatedHeadEngine(SimulatedEngine):
    """Runs `HeadDrafts`.

    For the first draft, the head takes `HEAD_SHARE` of the time of a step with the same tokens. For
    each further draft, it takes half of this share of a step with one token per request.

    Attributes:
        num_right: Returns how many drafts of a proposal are right, from the number of tokens of the
            request.
    """

    HEAD_SHARE = 0.15

    num_right: Callable[[int, random.Random], int]

    def _propose(self, step: _StepInFlight) -> dict[str, list[int]]:
        found = {}
        num_proposed = step.planned.num_proposed
        for req_id, num_drawn in step.num_draws.items():
            row = self._requests.get(req_id)
            if row is not None and num_drawn > 0 and num_proposed > 0:
                num_right = min(num_proposed, self.num_right(row.num_known, self._rng))
                right = [*range(row.num_known, row.num_known + num_right)]
                found[req_id] = right + [-1] * (num_proposed - num_right)
        return found

    def _proposing_s(self, planned: HeadStep | None) -> float:
        if planned is None or not planned.num_proposed:
            return 0.0
        first_s = self._machine.mean_s(planned.num_tokens)
        later_s = self._machine.mean_s(len(planned.requests)) * (planned.num_proposed - 1) / 2
        return self.HEAD_SHARE * (first_s + later_s)
