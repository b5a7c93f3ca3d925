"""`Drafts`: the drafter sees the tokens that a request has, and no others."""

import numpy as np

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from paxkv.runner.drafters.base import Drafter, RequestDrafter
from paxkv.runner.drafters.draft_pacer import DraftChoice, DraftPacer
from paxkv.runner.features.drafts import Drafts
from paxkv.runner.shapes.scheduled_rows import ScheduledRows


class CopyingRequest(RequestDrafter):
    def __init__(self, token_ids):
        self.token_ids = list(token_ids)

    def extend(self, token_ids):
        self.token_ids += token_ids

    def propose(self, max_drafts):
        return self.token_ids[-max_drafts:]


class CopyingDrafter(Drafter):
    """Proposes a request's last tokens again, so that they can be read from its proposals."""

    def __init__(self):
        self.ended = []

    def start(self, token_ids):
        return CopyingRequest(token_ids)

    def end(self, request):
        self.ended.append(request.token_ids)


class FixedPacer(DraftPacer):
    def __init__(self, choice):
        super().__init__()
        self.choice, self.recorded = choice, []

    def record_step(self, **step):
        self.recorded.append(step)

    def choose(self, num_reqs, proposals, chances):
        return self.choice


def decide(drafts, *, new=(), resumed=None, preempted=(), finished=()):
    drafts.before_step(
        SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=[1, 2, 3],
                    sampling_params=SamplingParams(),
                    block_ids=([1],),
                    num_computed_tokens=0,
                    is_pooled=req_id == "pooled",
                )
                for req_id in new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=list(resumed or {}),
                resumed_req_ids=frozenset(resumed or {}),
                new_block_ids=[None for _ in resumed or {}],
                num_computed_tokens=[0 for _ in resumed or {}],
                num_output_tokens=[0 for _ in resumed or {}],
                all_token_ids=resumed or {},
            ),
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            preempted_req_ids=frozenset(preempted),
            finished_req_ids=frozenset(finished),
        ),
        None,
    )


def plan(drafts, *req_ids, num_computed=0, num_scheduled=3, num_tokens=3, num_drafts=0):
    num_reqs = len(req_ids)
    numbers = [num_computed, num_scheduled, num_tokens, 0, num_drafts]
    computed, scheduled, known, pending, drafted = (np.full(num_reqs, n, np.int32) for n in numbers)
    return drafts.plan(
        ScheduledRows(
            list(req_ids),
            rows_np=np.arange(num_reqs, dtype=np.int32),
            num_scheduled_np=scheduled,
            num_computed_np=computed,
            num_tokens_np=known,
            num_pending_np=pending,
            num_drafts_np=drafted,
            token_ids_np=np.zeros((num_reqs, 8), np.int32),
        )
    )


def finish(step, **sampled):
    output = ModelRunnerOutput(
        req_ids=list(sampled),
        sampled_token_ids=list(sampled.values()),
        logprobs=[None] * len(sampled),
    )
    return step.finish(output, {}).draft_token_ids


def test_drafts_follow_the_drawn_tokens():
    drafts = Drafts(CopyingDrafter(), max_drafts=2, pacer=None)
    decide(drafts, new=["a", "b", "pooled"])
    step = plan(drafts, "a", "b", "pooled")
    # "b" has more of its prompt to compute.
    assert finish(step, a=[7], b=[], pooled=[]) == {"a": [3, 7]}
    assert finish(plan(drafts, "a"), a=[8, 9]) == {"a": [8, 9]}


def test_drafter_ignores_tokens_of_a_step_before_a_preemption():
    drafter = CopyingDrafter()
    drafts = Drafts(drafter, max_drafts=4, pacer=None)
    decide(drafts, new=["a"])
    late = plan(drafts, "a")
    decide(drafts, preempted=["a"])
    assert finish(late, a=[7]) == {}
    decide(drafts, resumed={"a": [1, 2, 3, 5]})
    # Also if the request has resumed by then.
    assert finish(late, a=[7]) == {}
    assert finish(plan(drafts, "a"), a=[6]) == {"a": [2, 3, 5, 6]}
    assert drafter.ended == []
    late = plan(drafts, "a")
    decide(drafts, finished=["a", "never started"])
    assert finish(late, a=[7]) == {}
    assert drafter.ended == [[1, 2, 3, 5, 6]]


class RecordedRequest(CopyingRequest):
    num_proposals = 0

    def propose(self, max_drafts):
        self.num_proposals += 1
        return super().propose(max_drafts)


class RecordedDrafter(Drafter):
    def start(self, token_ids):
        self.request = RecordedRequest(token_ids)
        return self.request

    def end(self, request):
        pass


class SwitchedPacer(FixedPacer):
    may = False

    def may_draft(self, num_reqs):
        return self.may

    def choose(self, num_reqs, proposals, chances):
        self.chances = chances
        return super().choose(num_reqs, proposals, chances)


def test_few_proposals_are_made_and_compared_while_no_draft_can_be_verified():
    drafter, pacer = RecordedDrafter(), SwitchedPacer(DraftChoice(drafts={}, is_ahead=True))
    drafts = Drafts(drafter, max_drafts=2, pacer=pacer)
    decide(drafts, new=["a"])
    for token_id in (7, 3, 7, 8):
        finish(plan(drafts, "a"), a=[token_id])
        assert not pacer.chances
    # The proposal after the first token is [3, 7]. The second one follows when both were compared,
    # and the third one after 8, which is not its first token.
    assert drafter.request.num_proposals == 3
    pacer.may = True
    finish(plan(drafts, "a"), a=[7])
    assert pacer.chances["a"][0] > 0.5
    assert drafter.request.num_proposals == 4


def test_pacer_decides_and_records_every_step():
    pacer = FixedPacer(DraftChoice(drafts={"a": [3]}, is_ahead=False))
    drafts = Drafts(CopyingDrafter(), max_drafts=2, pacer=pacer)
    decide(drafts, new=["a"])
    assert finish(plan(drafts, "a"), a=[7]) == {"a": [3]}
    step = plan(drafts, "a", num_computed=3, num_scheduled=3, num_tokens=4, num_drafts=2)
    assert finish(step, a=[8, 9]) == {"a": [3]}
    numbers = [(s["is_decode"], s["num_drafts"]) for s in pacer.recorded]
    assert numbers == [(False, 0), (True, 2)]
    assert pacer.recorded[1]["num_drawn"] == 2
    # A step inside a prompt only records its time.
    assert finish(plan(drafts, "a"), a=[]) == {}
    assert not pacer.recorded[2]["is_decode"] and pacer.recorded[2]["num_drawn"] == 0
    # Names a request without drafts, so that the scheduler waits.
    pacer.choice = DraftChoice(drafts={}, is_ahead=False)
    assert finish(plan(drafts, "a"), a=[7]) == {"a": []}
    pacer.choice = DraftChoice(drafts={}, is_ahead=True)
    assert finish(plan(drafts, "a"), a=[7]) == {}


class CountingRequest(CopyingRequest):
    """Proposes the next token, which is the last one plus 1."""

    def propose(self, max_drafts):
        return [self.token_ids[-1] + 1]


class CountingDrafter(CopyingDrafter):
    def start(self, token_ids):
        return CountingRequest(token_ids)


def test_time_of_accepted_drafts_that_are_computed_again_counts():
    """Each token takes a second, so that a right draft costs as much as two tokens."""
    now_s, num_drawn, num_drafts, num_own, num_known = 0.0, 0, 0, 3, 3
    pacer = DraftPacer(clock=lambda: now_s)
    drafts = Drafts(CountingDrafter(), max_drafts=1, pacer=pacer)
    decide(drafts, new=["a"])
    for _ in range(2000):
        step = plan(
            *(drafts, "a"),
            num_computed=num_known - num_own,
            num_scheduled=num_own + num_drafts,
            num_tokens=num_known,
            num_drafts=num_drafts,
        )
        now_s += num_own + num_drafts
        num_own = 1 + num_drafts
        found = finish(step, a=[*range(num_known + 1, num_known + num_own + 1)])
        num_drafts = len(found.get("a", ()))
        num_known += num_own
        num_drawn += num_own
    assert num_drawn > 0.95 * now_s
