"""`HeadDrafts`: which proposals of a head are verified."""

import numpy as np

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from paxkv.runner.drafters.acceptance import Acceptance
from paxkv.runner.drafters.depth_pacer import DepthPacer
from paxkv.runner.features.head_drafts import HeadDrafts, HeadStep
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from tests.paxkv.no_cached import NO_CACHED


class RecordingPacer(DepthPacer):
    """Keeps the last argument of `choose`."""

    def __init__(self):
        super().__init__(max_drafts=2)
        self.chances = []

    def choose(self, num_reqs, chances):
        self.chances = chances()
        return super().choose(num_reqs, chances)


class Run:
    """Steps of one request, whose tokens are all 7."""

    def __init__(self):
        self.pacer = RecordingPacer()
        self.feature = HeadDrafts(None, max_drafts=2, pacer=self.pacer)
        self.start()

    def start(self):
        self.feature._requests["r"] = Acceptance(self.feature._total)

    def step(self, draft_ids, *, is_decode=True):
        planned = HeadStep(
            feature=self.feature,
            requests=[self.feature._requests["r"]],
            num_tokens=1,
            num_drafts=0,
            num_proposed=len(draft_ids),
            complete_ids=frozenset({"r"} if draft_ids else ()),
            num_decode_steps=1,
            is_decode=is_decode,
        )
        output = ModelRunnerOutput(
            req_ids=("r",),
            sampled_token_ids=[[7]],
            logprobs=[None],
            draft_token_ids={"r": draft_ids},
        )
        self.feature.keep_drafts(planned, output)
        return self.pacer.chances[0][0]


def test_wrong_drafts_after_a_gap_do_not_count_for_new_requests():
    run = Run()
    for _ in range(20):
        run.start()
        run.step([7], is_decode=False)
        run.step([])
        for _ in range(5):
            with_gap = run.step([8, 8])
    assert with_gap < 0.2
    run.start()
    assert run.step([7], is_decode=False) > 0.8


def test_proposal_from_before_a_gap_counts_as_complete():
    run = Run()
    for _ in range(20):
        run.start()
        run.step([8], is_decode=False)
        run.step([])
    run.start()
    assert run.step([7], is_decode=False) < 0.2


class PromptPacer(DepthPacer):
    """Tries the prompts of the steps that `tries` names, and verifies no drafts."""

    def __init__(self):
        super().__init__(max_drafts=2)
        self.tries = True

    def tries_prompts(self, num_reqs, chances):
        return self.tries


def plan(feature, *, new=(), num_decode_steps=1, **tokens):
    """Plans a step or burst; `tokens` has (computed before, scheduled, known) of each request."""
    feature.before_step(
        SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=[1] * tokens[req_id][2],
                    sampling_params=SamplingParams(),
                    block_ids=([1],),
                    num_computed_tokens=0,
                )
                for req_id in new
            ],
            scheduled_cached_reqs=NO_CACHED,
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            preempted_req_ids=frozenset(),
            finished_req_ids=frozenset(),
        ),
        None,
    )
    computed, scheduled, known = (np.array(t, np.int32) for t in zip(*tokens.values(), strict=True))
    return feature.plan(
        ScheduledRows(
            [*tokens],
            rows_np=np.arange(len(tokens), dtype=np.int32),
            num_scheduled_np=scheduled,
            num_computed_np=computed,
            num_tokens_np=known,
            num_pending_np=np.zeros_like(known),
            token_ids_np=np.zeros((8, 8), np.int32),
            num_decode_steps=num_decode_steps,
        )
    )


def test_head_computes_the_whole_prompts_that_it_tries_and_no_others():
    pacer = PromptPacer()
    feature = HeadDrafts(None, max_drafts=2, pacer=pacer)
    first = plan(feature, new=["a"], a=(0, 4, 8))
    pacer.tries = False
    # The rest of "a" is computed. The head misses nothing of "b", but "b" is not tried.
    second = plan(feature, new=["b"], a=(4, 4, 8), b=(0, 2, 6))
    third = plan(feature, a=(8, 1, 8), b=(2, 4, 6))
    assert [step.num_proposed for step in (first, second, third)] == [1, 1, 0]
    assert [step.complete_ids for step in (first, second, third)] == [{"a"}, {"a"}, set()]
    # Steps that start no request are not tried.
    pacer.tries = True
    assert plan(feature, b=(5, 1, 6)).num_proposed == 0


def test_head_computes_all_prompts_while_drafts_are_verified(monkeypatch):
    pacer = PromptPacer()
    pacer.tries = False
    monkeypatch.setattr(PromptPacer, "num_drafts", 2)
    feature = HeadDrafts(None, max_drafts=2, pacer=pacer)
    # All tokens of the prompt except the last one were cached.
    for tokens in ((0, 8, 8), (7, 1, 8)):
        step = plan(feature, new=["a"], a=tokens)
        assert (step.num_proposed, step.complete_ids) == (2, {"a"})


def test_drafts_that_are_computed_again_are_no_prompt(monkeypatch):
    """Models with states do so. The head need not run for them, and the step's time counts."""
    feature = HeadDrafts(None, max_drafts=2, pacer=PromptPacer())
    first = plan(feature, new=["a"], a=(0, 8, 8))
    output = ModelRunnerOutput(req_ids=("a",), sampled_token_ids=[[7, 7, 7]], logprobs=[None])
    feature.keep_drafts(first, output)
    again = plan(feature, a=(8, 3, 11))
    assert (again.is_decode, again.num_proposed) == (True, 0)
    # A step of two of the three known tokens computes a part of a prompt. The head must compute it.
    feature.keep_drafts(plan(feature, new=["a"], a=(0, 8, 11)), output)
    rest = plan(feature, a=(8, 2, 11))
    assert (rest.is_decode, rest.num_proposed) == (False, 1)
