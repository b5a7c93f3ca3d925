"""`Acceptance`: the share of proposals that turn out right, without verifying them."""

import pytest

from paxkv.runner.drafters.acceptance import Acceptance, TotalAcceptance


def propose_and_draw(acceptance, proposal, drawn, num_times=1):
    for _ in range(num_times):
        acceptance.record_proposal(proposal)
        acceptance.record_drawn(drawn)


def test_rate_counts_drafts_up_to_the_first_wrong_one():
    right, half, wrong = (Acceptance(TotalAcceptance()) for _ in range(3))
    propose_and_draw(right, [7, 8, 9], [7, 8, 9, 5], 50)
    propose_and_draw(half, [7, 8, 9], [7, 5], 50)
    propose_and_draw(wrong, [7, 8, 9], [5, 8, 9], 50)
    assert right.rate > 0.95
    assert half.rate == pytest.approx(0.5, abs=0.02)
    assert wrong.rate < 0.05


def test_proposals_without_drawn_tokens_do_not_count():
    acceptance = Acceptance(TotalAcceptance())
    propose_and_draw(acceptance, [7, 8, 9], [7], 50)
    assert acceptance.rate > 0.95
    before = acceptance.rate
    propose_and_draw(acceptance, [], [5], 50)
    acceptance.record_drawn([5])
    assert acceptance.rate == before


def test_new_request_is_expected_to_be_like_the_others():
    total = TotalAcceptance()
    assert Acceptance(total).rate == 0.5
    propose_and_draw(Acceptance(total), [7], [5], 100)
    assert Acceptance(total).rate < 0.05
    lucky = Acceptance(total)
    propose_and_draw(lucky, [7, 8], [7, 8], 3)
    assert lucky.rate > 0.7


def test_rate_follows_a_change_soon():
    acceptance = Acceptance(TotalAcceptance())
    propose_and_draw(acceptance, [7, 8, 9], [7, 8, 9], 100)
    propose_and_draw(acceptance, [7, 8, 9], [5], 20)
    assert acceptance.rate < 0.4
