"""An engine with drafts, whose step times are drawn from a model of a machine. It computes nothing.

The text of every request is 0, 1, 2, ..., so the token at a position is the position.
"""

import dataclasses
import math
import random
from collections.abc import Callable

import numpy as np

from paxkv.contracts.scheduler_output import ModelRunnerOutput
from paxkv.runner.drafters.acceptance import Acceptance
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
        num_pending: Tokens that steps in flight draw.
        num_own: Tokens before the drafts that the next step computes.
    """

    num_known: int = 1
    num_pending: int = 0
    num_own: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StepInFlight:
    planned: object
    took_s: float
    drafts: list[list[int]]
    num_decode_steps: int


class SimulatedEngine:
    """Runs requests that never end.

    Args:
        make_feature: Makes the step feature from a clock.
        has_states: A step computes the drafts again that the step before it accepted.
        burst_len: Decode steps of a burst, while the engine does not wait for tokens.
    """

    def __init__(
        self,
        machine: Machine,
        make_feature: Callable[[Callable[[], float]], object],
        *,
        num_reqs: int,
        has_states: bool = False,
        burst_len: int = 1,
        seed: int = 0,
    ) -> None:
        self._machine, self._has_states, self._burst_len = machine, has_states, burst_len
        self._rng = random.Random(seed)
        self.now_s = self._mean_s = 0.0
        self.num_tokens = 0
        self._requests = {f"r{idx}": _Request() for idx in range(num_reqs)}
        self._in_flight: list[_StepInFlight] = []
        self._drafts: dict[str, list[int]] = {}
        self._feature = make_feature(lambda: self.now_s)
        self._start_requests()

    def _start_requests(self) -> None:
        for req_id in self._requests:
            self._feature._start(req_id, [0])

    def _propose(self, planned: object) -> dict[str, list[int]]:
        """Drafts that the device proposes after a step."""
        return {}

    def _proposing_s(self, planned: object) -> float:
        """Seconds for these drafts."""
        return 0.0

    def run(self, num_tokens: int) -> float:
        """Runs until requests have `num_tokens` more tokens on average.

        Returns tokens per second, from times without noise.
        """
        start_s, start = self._mean_s, self.num_tokens
        while self.num_tokens - start < num_tokens * len(self._requests):
            is_waiting = bool(self._drafts)
            while len(self._in_flight) < (1 if is_waiting else 2):
                self._decide(is_waiting)
            self._fetch(self._in_flight.pop(0))
        return (self.num_tokens - start) / (self._mean_s - start_s)

    def _decide(self, is_waiting: bool) -> None:
        rows = self._requests.values()
        drafts = [self._drafts.get(req_id, []) if is_waiting else [] for req_id in self._requests]
        own = [row.num_own for row in rows]
        num_steps = 1 if is_waiting or max(own) > 1 else self._burst_len
        num_tokens = sum(own) + sum(map(len, drafts))
        took_s = self._machine.mean_s(num_tokens, num_steps=num_steps, was_idle=not self._in_flight)
        numbers = (
            [count + len(tokens) for count, tokens in zip(own, drafts, strict=True)],
            [row.num_known + row.num_pending - row.num_own for row in rows],
            [row.num_known for row in rows],
            [row.num_pending for row in rows],
            [*map(len, drafts)],
        )
        scheduled, computed, known, pending, drafted = (
            np.array(each, np.int32) for each in numbers
        )
        planned = self._feature.plan(
            ScheduledRows(
                [*self._requests],
                rows_np=np.arange(len(own), dtype=np.int32),
                num_scheduled_np=scheduled,
                num_computed_np=computed,
                num_tokens_np=known,
                num_pending_np=pending,
                num_drafts_np=drafted,
                token_ids_np=np.zeros((len(own), 1), np.int32),
                num_decode_steps=num_steps,
            )
        )
        took_s += self._proposing_s(planned)
        for row in rows:
            row.num_pending += num_steps
            row.num_own = 1
        self._in_flight.append(
            _StepInFlight(planned=planned, took_s=took_s, drafts=drafts, num_decode_steps=num_steps)
        )

    def _fetch(self, step: _StepInFlight) -> None:
        self._mean_s += step.took_s
        self.now_s += step.took_s * self._machine.draw_factor(self._rng)
        sampled = []
        for row, drafts in zip(self._requests.values(), step.drafts, strict=True):
            num_right = 0
            while num_right < len(drafts) and drafts[num_right] == row.num_known + num_right:
                num_right += 1
            num_drawn = step.num_decode_steps + num_right
            sampled.append([*range(row.num_known, row.num_known + num_drawn)])
            row.num_known += num_drawn
            row.num_pending -= step.num_decode_steps
            row.num_own = 1 + num_right * self._has_states
            self.num_tokens += num_drawn
        output = ModelRunnerOutput(
            req_ids=[*self._requests],
            sampled_token_ids=sampled,
            logprobs=[None] * len(sampled),
            draft_token_ids=self._propose(step.planned),
        )
        self._drafts = step.planned.finish(output, {}).draft_token_ids


class SimulatedHeadEngine(SimulatedEngine):
    """Runs `HeadDrafts`.

    The first draft takes `HEAD_SHARE` of the time of a step with a row for each request, and each
    further draft takes half as long.

    Attributes:
        num_right: Returns how many drafts of a proposal are right, from the number of tokens of the
            request.
    """

    HEAD_SHARE = 0.15

    num_right: Callable[[int, random.Random], int]

    def _start_requests(self) -> None:
        for req_id in self._requests:
            self._feature._requests[req_id] = Acceptance(self._feature._total)

    def _propose(self, planned: HeadStep) -> dict[str, list[int]]:
        found = {}
        if planned.num_proposed:
            for req_id, row in self._requests.items():
                num_right = min(planned.num_proposed, self.num_right(row.num_known, self._rng))
                right = [*range(row.num_known, row.num_known + num_right)]
                found[req_id] = right + [-1] * (planned.num_proposed - num_right)
        return found

    def _proposing_s(self, planned: HeadStep) -> float:
        if not planned.num_proposed:
            return 0.0
        head_s = self.HEAD_SHARE * self._machine.mean_s(len(self._requests))
        return head_s * (1 + planned.num_proposed) / 2
