"""A step feature that proposes drafts for the next step, from a drafter on the host."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.runner.drafters.base import Drafter, RequestDrafter
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from paxkv.runner.shapes.step_variant import StepVariant


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _DraftedStep(FeatureStep):
    """One step.

    Args:
        requests: The drafter's state of each request of the step; None for pooled requests.
    """

    drafts: "Drafts"
    requests: Sequence[RequestDrafter | None]
    variant: None = None

    def fill(self, views: Mapping[str, np.ndarray]) -> None:
        """Fills nothing, because there is no variant."""

    def finish(
        self, output: ModelRunnerOutput, results: Mapping[str, np.ndarray]
    ) -> ModelRunnerOutput:
        return dataclasses.replace(
            output, draft_token_ids=self.drafts.propose(self.requests, output)
        )


class Drafts(StepFeature):
    """Gives the tokens of each step to the drafter, and the drafter's proposals to the scheduler.

    Args:
        max_drafts: Most drafts of a request in one step.
    """

    def __init__(self, drafter: Drafter, *, max_drafts: int) -> None:
        self._drafter = drafter
        self._max_drafts = max_drafts
        # The running requests, except pooled ones.
        self._requests: dict[str, RequestDrafter] = {}

    @property
    def max_drafts(self) -> int:
        return self._max_drafts

    def variants(self) -> tuple[StepVariant, ...]:
        return ()

    def before_step(self, scheduler_output: SchedulerOutput, device: FeatureDevice) -> None:
        for req_id in scheduler_output.finished_req_ids:
            if req_id in self._requests:
                self._drafter.end(self._requests.pop(req_id))
        # Tokens that steps in flight draw for a preempted request are dropped. The request starts
        # again with the tokens that the scheduler has.
        for req_id in scheduler_output.preempted_req_ids:
            self._requests.pop(req_id, None)
        for req_id, token_ids in scheduler_output.scheduled_cached_reqs.all_token_ids.items():
            self._requests[req_id] = self._drafter.start(token_ids)
        for new_req in scheduler_output.scheduled_new_reqs:
            if not new_req.is_pooled:
                self._requests[new_req.req_id] = self._drafter.start(new_req.prompt_token_ids)

    def plan(self, step: ScheduledRows) -> FeatureStep | None:
        return _DraftedStep(drafts=self, requests=[*map(self._requests.get, step.req_ids)])

    def propose(
        self, requests: Sequence[RequestDrafter | None], output: ModelRunnerOutput
    ) -> dict[str, list[int]]:
        """Adds the tokens of a step, and returns drafts by request id."""
        drafts = {}
        for req_id, token_ids, request in zip(
            output.req_ids, output.sampled_token_ids, requests, strict=True
        ):
            # The request may have ended, or lost its row, since the step was planned.
            if request is None or not token_ids or self._requests.get(req_id) is not request:
                continue
            request.extend(token_ids)
            if found := request.propose(self._max_drafts):
                drafts[req_id] = found
        return drafts
