"""`BurstHeadDrafts`: after which single steps the head runs."""

import pytest

from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer
from paxkv.runner.drafters.depth_pacer import STEPS_PER_TRIAL, DepthPacer
from paxkv.runner.features import burst_head_drafts
from paxkv.runner.features.burst_head_drafts import BurstHeadDrafts
from tests.paxkv.runner.features.test_head_drafts import plan


class DraftingPacer(BurstDraftPacer):
    def choose(self, num_reqs, num_decode_steps):
        return True


def make_feature(*, adapts):
    return BurstHeadDrafts(
        None,
        max_drafts=2,
        pacer=DepthPacer(2) if adapts else None,
        burst_pacer=DraftingPacer() if adapts else None,
    )


def num_proposed(feature, *, first, num_steps):
    """Drafts that the head proposes after each of some decode steps, of which none is verified."""
    positions = range(first, first + num_steps)
    return [plan(feature, a=(place, 1, place + 1)).num_proposed for place in positions]


@pytest.mark.parametrize("adapts", [True, False])
def test_head_pauses_after_many_decode_steps_without_a_burst(adapts, monkeypatch):
    monkeypatch.setattr(burst_head_drafts, "_MAX_SINGLE_STEPS", 3)
    feature = make_feature(adapts=adapts)
    paused = 0 if adapts else 1
    assert plan(feature, new=["a"], a=(0, 4, 4)).num_proposed == 1
    assert num_proposed(feature, first=4, num_steps=5) == [1, 1, 1, paused, paused]
    # Prompts do not end the pause.
    assert plan(feature, new=["b"], a=(9, 1, 10), b=(0, 4, 4)).num_proposed == paused
    assert num_proposed(feature, first=10, num_steps=1) == [paused]
    assert plan(feature, num_decode_steps=4, a=(11, 4, 12)).verifies_drafts
    assert num_proposed(feature, first=15, num_steps=4) == [1, 1, 1, paused]


class PlainPacer(BurstDraftPacer):
    """Tries drafts in bursts only when the test says so."""

    tries = False
    num_choices = 0

    def choose(self, num_reqs, num_decode_steps):
        self.num_choices += 1
        return self.tries


def test_head_computes_few_prompts_while_bursts_verify_no_drafts():
    pacer = PlainPacer()
    feature = BurstHeadDrafts(None, max_drafts=2, pacer=DepthPacer(2), burst_pacer=pacer)
    assert plan(feature, new=["first"], first=(0, 4, 4)).num_proposed == 1
    assert not plan(feature, num_decode_steps=4, first=(4, 4, 5)).verifies_drafts
    pacer.tries = True
    tried = []
    for idx in range(64):
        req_id = f"r{idx}"
        is_run = bool(plan(feature, new=[req_id], **{req_id: (0, 4, 8)}).num_proposed)
        # The head computes the rest of a prompt, and the next token, as it did the beginning.
        assert plan(feature, **{req_id: (4, 4, 8)}).num_proposed == is_run
        assert plan(feature, **{req_id: (8, 1, 9)}).num_proposed == is_run
        # Only a burst of requests without gaps shows whether drafts pay.
        burst = plan(feature, num_decode_steps=4, **{req_id: (9, 4, 10)})
        assert burst.verifies_drafts == is_run
        tried.append(is_run)
        pacer.tries = False
        plan(feature, num_decode_steps=4, **{req_id: (13, 4, 14)})
        pacer.tries = True
    assert sum(tried) == 2


def test_burst_pacer_is_asked_only_if_its_choice_counts():
    pacer = PlainPacer()
    feature = BurstHeadDrafts(None, max_drafts=2, pacer=DepthPacer(2), burst_pacer=pacer)
    plan(feature, new=["a"], a=(0, 4, 4))
    bursts = [(4 + 4 * idx, 4, 5 + 4 * idx) for idx in range(STEPS_PER_TRIAL + 2)]
    plan(feature, num_decode_steps=4, a=bursts[0])
    assert pacer.num_choices == 1
    pacer.tries = True
    # The head lacks the tokens of the first burst. Drafts are tried nevertheless, but late.
    drafting = [plan(feature, num_decode_steps=4, a=burst).verifies_drafts for burst in bursts[1:]]
    assert drafting.index(True) == STEPS_PER_TRIAL - 1
    assert pacer.num_choices == 1 + sum(drafting)
    assert all(drafting[STEPS_PER_TRIAL - 1 :])
