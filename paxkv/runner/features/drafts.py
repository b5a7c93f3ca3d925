"""A step feature that proposes drafts for the next step, from a drafter on the host."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from paxkv.config.sampling_params import is_wide
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.runner.drafters.acceptance import Acceptance, TotalAcceptance
from paxkv.runner.drafters.base import Drafter, RequestDrafter
from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer
from paxkv.runner.drafters.draft_pacer import DraftPacer
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from paxkv.runner.shapes.step_variant import StepVariant


@dataclasses.dataclass(slots=True, kw_only=True)
class _DraftedRequest:
    drafter: RequestDrafter
    acceptance: Acceptance
    # Tokens that the request got from its last step; 0 if it had none.
    num_drawn: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _DraftedStep(FeatureStep):
    """One step, or several bursts of the same requests.

    Args:
        requests: The requests of the step; None for pooled ones.
        num_recomputed: Accepted drafts that the step computes again, if `is_decode`.
        is_decode: See `ScheduledRows.is_decode_after`.
        is_drafting: The step is a burst that verifies drafts.
    """

    drafts: "Drafts"
    requests: Sequence[_DraftedRequest | None]
    num_drafts: int
    num_recomputed: int
    num_decode_steps: int
    is_decode: bool
    is_drafting: bool
    variant: None = None

    @property
    def is_repeatable(self) -> bool:
        return self.drafts.bursts_are_alike

    @property
    def verifies_drafts(self) -> bool:
        return self.is_drafting

    def in_plain_burst(self) -> FeatureStep:
        return dataclasses.replace(self, is_drafting=False)

    def fill(self, views: Mapping[str, np.ndarray]) -> None:
        """Fills nothing, because there is no variant."""

    def finish(
        self, output: ModelRunnerOutput, results: Mapping[str, np.ndarray]
    ) -> ModelRunnerOutput:
        return dataclasses.replace(output, draft_token_ids=self.drafts.propose(self, output))


class Drafts(StepFeature):
    """Gives the tokens of each step to the drafter, and the drafter's proposals to the scheduler.

    Args:
        max_drafts: Most drafts of a request in one step.
        pacer: Decides which proposals are worth their time. None: all are.
        are_in_bursts: Bursts find and verify drafts. The drafter then proposes tokens only while a
            request of the step cannot be in a burst.
        burst_pacer: Decides which bursts verify drafts. None: all do, if `are_in_bursts`.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_drafts: int,
        pacer: DraftPacer | None,
        are_in_bursts: bool = False,
        burst_pacer: BurstDraftPacer | None = None,
    ) -> None:
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._pacer = pacer
        self._are_in_bursts = are_in_bursts
        self._burst_pacer = burst_pacer
        self._total = TotalAcceptance()
        # The running requests, except pooled ones.
        self._requests: dict[str, _DraftedRequest] = {}
        # Unfinished requests that need the host between their tokens.
        self._single_step_ids: set[str] = set()

    @property
    def max_drafts(self) -> int:
        return self._max_drafts

    @property
    def bursts_are_alike(self) -> bool:
        """Whether all bursts verify drafts, or none does."""
        return self._burst_pacer is None

    def variants(self) -> tuple[StepVariant, ...]:
        return ()

    def before_step(self, scheduler_output: SchedulerOutput, device: FeatureDevice) -> None:
        self._single_step_ids -= scheduler_output.finished_req_ids
        for req_id in scheduler_output.finished_req_ids:
            if req_id in self._requests:
                self._drafter.end(self._requests.pop(req_id).drafter)
        # Tokens that steps in flight draw for a preempted request are dropped. The request starts
        # again with the tokens that the scheduler has.
        for req_id in scheduler_output.preempted_req_ids:
            self._requests.pop(req_id, None)
        for req_id, token_ids in scheduler_output.scheduled_cached_reqs.all_token_ids.items():
            self._start(req_id, token_ids)
        for new_req in scheduler_output.scheduled_new_reqs:
            if new_req.needs_grammar or is_wide(new_req.sampling_params.logprobs):
                self._single_step_ids.add(new_req.req_id)
            if not new_req.is_pooled:
                self._start(new_req.req_id, new_req.prompt_token_ids)

    def plan(self, step: ScheduledRows) -> FeatureStep | None:
        requests = [*map(self._requests.get, step.req_ids)]
        num_drafts = int(step.num_drafts_np.sum())
        num_recomputed = len(step.positions_np) - len(step.req_ids) - num_drafts
        return _DraftedStep(
            drafts=self,
            requests=requests,
            num_drafts=num_drafts,
            num_recomputed=num_recomputed if step.num_decode_steps == 1 else 0,
            num_decode_steps=step.num_decode_steps,
            is_decode=step.is_decode_after([0 if r is None else r.num_drawn for r in requests]),
            is_drafting=self._is_drafting(step),
        )

    def _is_drafting(self, step: ScheduledRows) -> bool:
        if not self._are_in_bursts or step.num_decode_steps == 1:
            return False
        pacer = self._burst_pacer
        return pacer is None or pacer.choose(len(step.req_ids), step.num_decode_steps)

    def propose(self, step: _DraftedStep, output: ModelRunnerOutput) -> dict[str, list[int]]:
        """Adds the tokens of a step, and returns drafts as `ModelRunnerOutput` has them."""
        if self._burst_pacer is not None:
            self._burst_pacer.record_step(
                num_reqs=len(output.req_ids),
                num_decode_steps=step.num_decode_steps,
                verifies_drafts=step.is_drafting,
            )
        drawn = self._record_tokens(step, output)
        if self._are_in_bursts and self._single_step_ids.isdisjoint(output.req_ids):
            return {}
        pacer = self._pacer
        if pacer is None:
            proposed = {req_id: self._propose(request) for req_id, request in drawn.items()}
            return {req_id: found for req_id, found in proposed.items() if found}
        # Steps that only compute prompts are recorded too, because they take time.
        pacer.record_step(
            num_reqs=len(output.req_ids),
            num_drafts=step.num_drafts,
            num_recomputed=step.num_recomputed,
            num_drawn=sum(request.num_drawn for request in drawn.values()),
            num_decode_steps=step.num_decode_steps,
            is_decode=step.is_decode,
        )
        if not drawn:
            return {}
        may_draft = pacer.may_draft(len(drawn))
        proposals: dict[str, list[int]] = {}
        chances: dict[str, list[float]] = {}
        for req_id, request in drawn.items():
            # A proposal that no step verifies still shows whether drafts would be right.
            if not may_draft and not request.acceptance.needs_proposal:
                continue
            if found := self._propose(request):
                request.acceptance.record_proposal(found)
                if may_draft:
                    proposals[req_id] = found
                    chances[req_id] = request.acceptance.chances(len(found))
        choice = pacer.choose(len(drawn), proposals, chances)
        if choice.is_ahead or choice.drafts:
            return choice.drafts
        # An entry without drafts keeps the engine from running ahead.
        return {next(iter(drawn)): []}

    def _record_tokens(
        self, step: _DraftedStep, output: ModelRunnerOutput
    ) -> dict[str, _DraftedRequest]:
        """Gives the tokens of a step to the drafter, and returns the requests that drew tokens."""
        drawn: dict[str, _DraftedRequest] = {}
        for req_id, token_ids, request in zip(
            output.req_ids, output.sampled_token_ids, step.requests, strict=True
        ):
            # The request may have ended, or lost its row, since the step was planned.
            if request is None or not token_ids or self._requests.get(req_id) is not request:
                continue
            drawn[req_id] = request
            request.num_drawn = len(token_ids)
            request.acceptance.record_drawn(token_ids)
            request.drafter.extend(token_ids)
        return drawn

    def _propose(self, request: _DraftedRequest) -> list[int]:
        return request.drafter.propose(self._max_drafts)

    def _start(self, req_id: str, token_ids: Sequence[int]) -> None:
        self._requests[req_id] = _DraftedRequest(
            drafter=self._drafter.start(token_ids), acceptance=Acceptance(self._total)
        )
