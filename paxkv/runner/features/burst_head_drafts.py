"""A step feature for a draft head whose drafts are verified within bursts."""

import dataclasses

from paxkv.config.sampling_params import is_wide
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer
from paxkv.runner.drafters.depth_pacer import STEPS_PER_TRIAL, DepthPacer
from paxkv.runner.features.base import FeatureStep
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.features.head_drafts import HeadDrafts, HeadStep
from paxkv.runner.features.target_hidden import TargetHiddenVariant
from paxkv.runner.shapes.scheduled_rows import ScheduledRows

# Single decode steps since the last burst after which the head pauses. There are no bursts while
# requests wait, or if a step takes as long as a burst may.
_MAX_SINGLE_STEPS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BurstHeadStep(HeadStep):
    """As `HeadStep`.

    Args:
        is_drafting: The step is a burst that verifies drafts.
        bursts_are_alike: All bursts verify drafts.
    """

    is_drafting: bool
    bursts_are_alike: bool

    @property
    def is_repeatable(self) -> bool:
        return self.bursts_are_alike

    @property
    def verifies_drafts(self) -> bool:
        return self.is_drafting

    def in_plain_burst(self) -> FeatureStep:
        return dataclasses.replace(self, is_drafting=False)


class BurstHeadDrafts(HeadDrafts):
    """Lets bursts propose and verify drafts.

    Between bursts, the head runs after single steps, so that it has keys and values of their
    tokens. It proposes drafts for single steps only while a request cannot be in a burst.
    Otherwise, single steps verify no drafts, so the head pauses if there are many without a burst.
    During a pause, or after a burst without drafts, the head computes the prompts of only one in
    `STEPS_PER_TRIAL` steps that start requests. Bursts of these requests then show whether drafts
    pay. After `STEPS_PER_TRIAL` bursts without drafts in which no request starts, bursts of the
    running requests may verify drafts too.

    Args:
        pacer: As in `HeadDrafts`, for single steps.
        burst_pacer: Decides which bursts verify drafts. None: all do, and the head never pauses.
    """

    def __init__(
        self,
        variant: TargetHiddenVariant | None,
        *,
        max_drafts: int,
        pacer: DepthPacer | None,
        burst_pacer: BurstDraftPacer | None,
    ) -> None:
        super().__init__(variant, max_drafts=max_drafts, pacer=pacer)
        self._burst_pacer = burst_pacer
        # Whether the last burst verified drafts.
        self._was_drafting = True
        # Bursts without drafts since a burst verified some, or a request started.
        self._num_plain_bursts = 0
        # Single decode steps since the last burst.
        self._num_single_steps = 0
        # Steps that started requests since the head last computed their prompts.
        self._num_untried = 0
        # Unfinished requests that need the host between their tokens.
        self._single_step_ids: set[str] = set()

    def before_step(self, scheduler_output: SchedulerOutput, device: FeatureDevice) -> None:
        super().before_step(scheduler_output, device)
        if self._started_ids:
            self._num_plain_bursts = 0
        self._single_step_ids -= scheduler_output.finished_req_ids
        self._single_step_ids |= {
            new.req_id
            for new in scheduler_output.scheduled_new_reqs
            if new.needs_grammar or is_wide(new.sampling_params.logprobs)
        }

    def plan(self, step: ScheduledRows) -> BurstHeadStep:
        complete_ids = self._complete_ids.intersection(step.req_ids)
        planned = super().plan(step)
        is_drafting = False
        if step.num_decode_steps > 1:
            are_complete = len(complete_ids) == len(step.req_ids)
            is_drafting = self._is_drafting(step, are_complete=are_complete)
            self._was_drafting, self._num_single_steps = is_drafting, 0
            if is_drafting:
                self._complete_ids |= complete_ids
        fields = {field.name: getattr(planned, field.name) for field in dataclasses.fields(planned)}
        return BurstHeadStep(
            **fields, is_drafting=is_drafting, bursts_are_alike=self._burst_pacer is None
        )

    def _is_drafting(self, burst: ScheduledRows, *, are_complete: bool) -> bool:
        """Whether a burst verifies drafts.

        Args:
            are_complete: The head has computed all earlier tokens of the burst's requests.
        """
        if self._burst_pacer is None:
            return True
        # After a burst without drafts, the head lacks tokens of the burst's requests. Their drafts
        # are worse, so they do not show whether drafts pay. But long requests stay incomplete, so
        # their drafts are tried after many bursts.
        self._num_plain_bursts = 0 if self._was_drafting else self._num_plain_bursts + 1
        if not (self._was_drafting or are_complete or self._num_plain_bursts >= STEPS_PER_TRIAL):
            return False
        return self._burst_pacer.choose(len(burst.req_ids), burst.num_decode_steps)

    def keep_drafts(self, step: BurstHeadStep, output: ModelRunnerOutput) -> dict[str, list[int]]:
        if self._burst_pacer is not None:
            self._burst_pacer.record_step(
                num_reqs=len(output.req_ids),
                num_decode_steps=step.num_decode_steps,
                verifies_drafts=step.is_drafting,
            )
        if self._single_step_ids.isdisjoint(output.req_ids):
            return {}
        return super().keep_drafts(step, output)

    def _num_proposed(self, step: ScheduledRows) -> int:
        if step.num_decode_steps == 1 and self._single_step_ids.isdisjoint(step.req_ids):
            self._num_single_steps += step.is_decode
            pauses = self._burst_pacer is not None and self._num_single_steps > _MAX_SINGLE_STEPS
            is_run = (self._was_drafting and not pauses) or self._tries_prompts()
            if is_run:
                self._complete_ids |= self._started_ids
            # The head also runs for requests of which it has computed all tokens so far.
            going_on = step.prompt_req_ids_after(self._num_drawn_of(step))
            if step.is_decode and not pauses:
                going_on = step.req_ids
            return int(is_run or not self._complete_ids.isdisjoint(going_on))
        return super()._num_proposed(step)

    def _tries_prompts(self) -> bool:
        self._num_untried += bool(self._started_ids)
        if self._num_untried < STEPS_PER_TRIAL:
            return False
        self._num_untried = 0
        return True
