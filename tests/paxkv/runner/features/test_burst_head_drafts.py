"""`BurstHeadDrafts`: after which single steps the head runs."""

import pytest

from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer
from paxkv.runner.drafters.depth_pacer import DepthPacer
from paxkv.runner.features import burst_head_drafts
from paxkv.runner.features.burst_head_drafts import BurstHeadDrafts
from tests.paxkv.runner.features.test_head_drafts import plan


class DraftingPacer(BurstDraftPacer):
    def choose(self, num_reqs):
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
    # It still computes prompts, which later bursts need. They do not end the pause.
    assert plan(feature, new=["b"], a=(9, 1, 10), b=(0, 4, 4)).num_proposed == 1
    assert num_proposed(feature, first=10, num_steps=1) == [paused]
    assert plan(feature, num_decode_steps=4, a=(11, 4, 12)).verifies_drafts
    assert num_proposed(feature, first=15, num_steps=4) == [1, 1, 1, paused]
