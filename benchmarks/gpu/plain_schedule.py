"""Decides steps without paxkv's scheduler: of an exact composition, or where it cannot run.

Requests have known lengths and end at nothing else; each gets all its blocks when it is admitted,
so nothing is preempted, nothing is cached, and no step depends on tokens. What is left is first
come, first served, with the prompts split over steps, as the scheduler does it.
"""

import dataclasses
from collections import deque

from benchmarks.workloads import Workload, WorkloadRequest
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What a runner can compute at once."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclasses.dataclass(slots=True)
class _Running:
    """An admitted request."""

    req_id: str
    request: WorkloadRequest
    block_ids: list[int]
    num_computed: int = 0

    @property
    def num_to_compute(self) -> int:
        """The last new token is drawn, and never computed."""
        return self.request.num_tokens - 1

    @property
    def num_prompt_left(self) -> int:
        return max(0, len(self.request.prompt_token_ids) - self.num_computed)


class PlainSchedule:
    """The steps of one workload.

    Args:
        name: Begins the ids of its requests, which no other request of the runner may have.
        prompts_first: Nobody decodes before all prompts are computed. Steps must then be fetched
            before the first decode.

    Raises:
        ValueError: A request can never run.
    """

    def __init__(
        self, workload: Workload, limits: StepLimits, *, name: str, prompts_first: bool = False
    ) -> None:
        self._limits = limits
        self._prompts_first = prompts_first
        self._params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
        self._waiting = deque((f"{name}.{i}", r) for i, r in enumerate(workload.requests))
        self._running: list[_Running] = []
        # Ended, which the runner has not heard.
        self._untold: set[str] = set()
        # Block 0 is nobody's.
        self._free_block_ids = list(range(limits.num_blocks - 1, 0, -1))
        most = max(self._num_blocks(request) for request in workload.requests)
        if most > len(self._free_block_ids):
            raise ValueError(
                f"a request needs {most} KV blocks, and there are {len(self._free_block_ids)}."
            )

    @property
    def has_prompts_left(self) -> bool:
        return bool(self._waiting) or any(row.num_prompt_left for row in self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache that the running requests attend to, the next one's own left out."""
        return sum(row.num_computed for row in self._running)

    def next_step(self, max_decode_steps: int = 1) -> SchedulerOutput | None:
        """Decides a step, or a burst where no prompt is left; None if all is decided."""
        self._retire()
        self._admit()
        if not self._running:
            return None
        num_steps = 1
        if any(row.num_prompt_left for row in self._running):
            scheduled = self._with_prompts()
        else:
            num_left = [row.num_to_compute - row.num_computed for row in self._running]
            # Who waits may come in as soon as one ends.
            end = min(num_left) if self._waiting else max(num_left)
            num_steps = min(max_decode_steps, end)
            scheduled = [
                (row, min(num_steps, n)) for row, n in zip(self._running, num_left, strict=True)
            ]
        output = self._output(scheduled, num_steps)
        for row, num_tokens in scheduled:
            row.num_computed += num_tokens
        return output

    def end(self) -> SchedulerOutput:
        """Tells the runner to forget whoever is left; nothing is decided afterwards."""
        self._untold |= {row.req_id for row in self._running if row.num_computed}
        self._running.clear()
        self._waiting.clear()
        return self._output([], 1)

    def _retire(self) -> None:
        done = [row for row in self._running if row.num_computed >= row.num_to_compute]
        if done:
            self._running = [r for r in self._running if r.num_computed < r.num_to_compute]
        for row in done:
            self._free_block_ids += row.block_ids
            self._untold.add(row.req_id)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            req_id, request = self._waiting[0]
            num_blocks = self._num_blocks(request)
            if num_blocks > len(self._free_block_ids):
                return
            self._waiting.popleft()
            block_ids = [self._free_block_ids.pop() for _ in range(num_blocks)]
            self._running.append(_Running(req_id, request, block_ids))

    def _num_blocks(self, request: WorkloadRequest) -> int:
        return -(-request.num_tokens // self._limits.block_size)

    def _with_prompts(self) -> list[tuple[_Running, int]]:
        """Decodes first, then prompts in their order, as far as the budget goes."""
        decoding = [row for row in self._running if not row.num_prompt_left]
        scheduled = [] if self._prompts_first else [(row, 1) for row in decoding]
        budget = self._limits.max_num_batched_tokens - len(scheduled)
        for row in self._running:
            num_tokens = min(row.num_prompt_left, budget)
            if num_tokens > 0:
                scheduled.append((row, num_tokens))
                budget -= num_tokens
        return scheduled

    def _output(self, scheduled: list[tuple[_Running, int]], num_steps: int) -> SchedulerOutput:
        finished, self._untold = frozenset(self._untold), set()
        new = [row for row, _ in scheduled if row.num_computed == 0]
        known = [row for row, _ in scheduled if row.num_computed > 0]
        num_scheduled_tokens = {row.req_id: num_tokens for row, num_tokens in scheduled}
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=row.req_id,
                    prompt_token_ids=row.request.prompt_token_ids,
                    sampling_params=self._params,
                    block_ids=(row.block_ids,),
                    num_computed_tokens=0,
                )
                for row in new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[row.req_id for row in known],
                resumed_req_ids=frozenset(),
                new_block_ids=[None] * len(known),
                num_computed_tokens=[row.num_computed for row in known],
                num_output_tokens=[
                    max(0, row.num_computed + 1 - len(row.request.prompt_token_ids))
                    for row in known
                ],
                all_token_ids={},
            ),
            num_scheduled_tokens=num_scheduled_tokens,
            total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
            preempted_req_ids=frozenset(),
            finished_req_ids=finished,
            num_decode_steps=num_steps,
        )
