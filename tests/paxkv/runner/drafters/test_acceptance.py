"""`Acceptance`: the share of proposals that turn out right, without verifying them."""

import pytest

from paxkv.runner.drafters.acceptance import Acceptance, TotalAcceptance


def propose_and_draw(acceptance, proposal, drawn, num_times=1):
    for _ in range(num_times):
        acceptance.record_proposal(proposal)
        acceptance.record_drawn(drawn)


def test_each_place_has_its_own_chance():
    all_right, first_right, wrong = (Acceptance(TotalAcceptance()) for _ in range(3))
    propose_and_draw(all_right, [7, 8, 9], [7, 8, 9, 5], 50)
    propose_and_draw(first_right, [7, 8, 9], [7, 5], 50)
    propose_and_draw(wrong, [7, 8, 9], [5, 8, 9], 50)
    assert min(all_right.chances(3)) > 0.9
    assert first_right.chances(3) == pytest.approx([1.0, 0.0, 0.0], abs=0.1)
    assert max(wrong.chances(3)) < 0.05


def test_later_drafts_are_compared_while_each_step_draws_one_token():
    acceptance = Acceptance(TotalAcceptance())
    for token_id in [7, 8, 5] * 50:
        # Only the proposal before 7 counts. Its last draft is wrong.
        acceptance.record_proposal([7, 8, 9] if token_id == 7 else [0])
        acceptance.record_drawn([token_id])
    assert acceptance.chances(3) == pytest.approx([1.0, 1.0, 0.0], abs=0.1)


def test_empty_proposals_do_not_count():
    acceptance = Acceptance(TotalAcceptance())
    propose_and_draw(acceptance, [7], [7], 50)
    before = acceptance.chances(3)
    propose_and_draw(acceptance, [], [5], 50)
    acceptance.record_drawn([5])
    assert acceptance.chances(3) == before


def test_unknown_places_are_expected_to_be_like_the_place_before():
    total = TotalAcceptance()
    assert total.chances(3) == [0.5, 0.25, 0.125]
    propose_and_draw(Acceptance(total), [7], [7], 100)
    assert min(total.chances(3)) > 0.9


def test_new_request_is_expected_to_be_like_the_others():
    total = TotalAcceptance()
    assert Acceptance(total).chances(1) == [0.5]
    propose_and_draw(Acceptance(total), [7], [5], 100)
    assert Acceptance(total).chances(1)[0] < 0.05
    lucky = Acceptance(total)
    propose_and_draw(lucky, [7, 8], [7, 8], 5)
    assert lucky.chances(1)[0] > 0.6


def test_chance_follows_a_change_soon():
    acceptance = Acceptance(TotalAcceptance())
    propose_and_draw(acceptance, [7, 8, 9], [7, 8, 9], 100)
    propose_and_draw(acceptance, [7, 8, 9], [5], 20)
    assert acceptance.chances(1)[0] < 0.4


def test_request_that_is_unlike_the_others_from_now_on_forgets_its_proposal():
    acceptance, other = Acceptance(TotalAcceptance()), TotalAcceptance()
    acceptance.record_proposal([7])
    acceptance.start_over(other)
    acceptance.record_drawn([7])
    assert acceptance.chances(1) == [0.5] == other.chances(1)
