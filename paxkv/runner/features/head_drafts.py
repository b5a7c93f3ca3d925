"""A step feature that decides whether a draft head runs after a step, and which drafts it keeps."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.runner.drafters.acceptance import Acceptance, TotalAcceptance
from paxkv.runner.drafters.depth_pacer import DepthPacer
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.features.target_hidden import TargetHiddenVariant
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from paxkv.runner.shapes.step_variant import StepVariant


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadStep(FeatureStep):
    """One step, or several bursts of the same requests.

    Args:
        requests: The requests of the step; None for pooled ones.
        num_tokens: Tokens that the step computes, including drafts.
        num_drafts: Most drafts of a request that the step verifies.
        num_proposed: Drafts that the head proposes for each request after the step. 0: it does
            not run.
        complete_ids: Requests of which the head has computed all tokens after the step.
        is_decode: See `ScheduledRows.is_decode_after`.
    """

    feature: "HeadDrafts"
    requests: Sequence[Acceptance | None]
    num_tokens: int
    num_drafts: int
    num_proposed: int
    complete_ids: frozenset[str]
    num_decode_steps: int
    is_decode: bool
    variant: None = None

    @property
    def is_repeatable(self) -> bool:
        return True

    @property
    def needs_step(self) -> bool:
        return self.num_proposed > 0

    def fill(self, views: Mapping[str, np.ndarray]) -> None:
        """Fills nothing, because there is no variant."""

    def record_tokens(self) -> None:
        self.feature.record_tokens()

    def finish(
        self, output: ModelRunnerOutput, results: Mapping[str, np.ndarray]
    ) -> ModelRunnerOutput:
        kept = self.feature.keep_drafts(self, output)
        return dataclasses.replace(output, draft_token_ids=kept)


class HeadDrafts(StepFeature):
    """Owns the array of hidden states that the head reads. The next step overwrites it.

    Args:
        variant: Fills the array. None: the drafter reads no hidden states.
        max_drafts: Most drafts that the head proposes for a request.
        pacer: Decides how many drafts are worth their time. None: always `max_drafts`.
    """

    def __init__(
        self, variant: TargetHiddenVariant | None, *, max_drafts: int, pacer: DepthPacer | None
    ) -> None:
        self._variant = variant
        self._max_drafts = max_drafts
        self._pacer = pacer
        # A request is incomplete after a step without the head, because the head then has no keys
        # and values of a token. Its drafts are worse, so they say nothing about other requests.
        self._total, self._incomplete_total = TotalAcceptance(), TotalAcceptance()
        # The running requests, except pooled ones.
        self._requests: dict[str, Acceptance] = {}
        # Tokens that they got from their last step, if a pacer needs them.
        self._num_drawn: dict[str, int] = {}
        # Requests that start in the step that is planned next.
        self._started_ids: set[str] = set()
        # Requests of which the head has computed all tokens so far.
        self._complete_ids: set[str] = set()

    @property
    def max_drafts(self) -> int:
        return self._max_drafts

    def variants(self) -> tuple[StepVariant, ...]:
        return () if self._variant is None else (self._variant,)

    def before_step(self, scheduler_output: SchedulerOutput, device: FeatureDevice) -> None:
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._requests.pop(req_id, None)
            self._num_drawn.pop(req_id, None)
            self._complete_ids.discard(req_id)
        started = [new.req_id for new in scheduler_output.scheduled_new_reqs if not new.is_pooled]
        for req_id in (*scheduler_output.scheduled_cached_reqs.all_token_ids, *started):
            self._requests[req_id] = Acceptance(self._total)
            self._started_ids.add(req_id)

    def plan(self, step: ScheduledRows) -> HeadStep:
        num_proposed = self._num_proposed(step)
        if num_proposed == 0:
            self._complete_ids.difference_update(step.req_ids)
        self._started_ids.clear()
        return HeadStep(
            feature=self,
            requests=[*map(self._requests.get, step.req_ids)],
            num_tokens=len(step.positions_np),
            num_drafts=int(step.num_drafts_np.max()),
            num_proposed=num_proposed,
            complete_ids=frozenset(self._complete_ids.intersection(step.req_ids)),
            num_decode_steps=step.num_decode_steps,
            is_decode=step.is_decode_after(self._num_drawn_of(step)),
        )

    def record_tokens(self) -> None:
        """Records that the tokens of a step were fetched just now, and no drafts yet."""
        if self._pacer is not None:
            self._pacer.record_tokens()

    def keep_drafts(self, step: HeadStep, output: ModelRunnerOutput) -> dict[str, list[int]]:
        """Records the tokens of a step, and returns the drafts for the next one."""
        if self._pacer is None:
            return output.draft_token_ids
        drawn: dict[str, Acceptance] = {}
        for req_id, token_ids, acceptance in zip(
            output.req_ids, output.sampled_token_ids, step.requests, strict=True
        ):
            # The request may have ended, or lost its row, since the step was planned.
            if acceptance is None or not token_ids or self._requests.get(req_id) is not acceptance:
                continue
            self._num_drawn[req_id] = len(token_ids)
            acceptance.record_drawn(token_ids)
            acceptance.record_proposal(output.draft_token_ids.get(req_id, ()))
            if req_id not in step.complete_ids:
                acceptance.start_over(self._incomplete_total)
            drawn[req_id] = acceptance
        self._pacer.record_step(
            num_reqs=len(output.req_ids),
            num_prompt_tokens=0 if step.is_decode else step.num_tokens,
            num_drawn=sum(map(len, output.sampled_token_ids)),
            num_drafts=step.num_proposed,
            num_verified=step.num_drafts,
            num_decode_steps=step.num_decode_steps,
            is_decode=step.is_decode,
        )
        if not drawn:
            return {}
        num_drafts = self._pacer.choose(
            len(drawn), lambda: [each.chances(self._max_drafts) for each in drawn.values()]
        )
        # An entry without drafts keeps the engine from running ahead.
        return {
            req_id: output.draft_token_ids.get(req_id, [])[:num_drafts]
            for req_id in (drawn if num_drafts else ())
        }

    def _num_proposed(self, step: ScheduledRows) -> int:
        if step.num_decode_steps > 1:
            return 0
        if self._pacer is None:
            return self._max_drafts
        num_drafts = self._pacer.num_drafts
        are_tried = num_drafts > 0
        prompt_ids = step.prompt_req_ids_after(self._num_drawn_of(step))
        if self._started_ids and prompt_ids and not are_tried:
            are_tried = self._pacer.tries_prompts(
                len(step.req_ids), self._total.chances(self._max_drafts)
            )
        if are_tried:
            self._complete_ids |= self._started_ids
        # The head must compute the rest of a prompt if it has computed the beginning.
        needs_rest = not self._complete_ids.isdisjoint(prompt_ids)
        return num_drafts or int(needs_rest)

    def _num_drawn_of(self, step: ScheduledRows) -> list[int]:
        return [self._num_drawn.get(req_id, 0) for req_id in step.req_ids]
