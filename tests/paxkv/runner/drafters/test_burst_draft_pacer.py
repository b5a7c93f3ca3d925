"""`BurstDraftPacer`: the bursts with less time per token, and the others now and then."""

import pytest

from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer


class Machine:
    """Computes bursts of 8 steps, two in flight, in fixed times per token."""

    def __init__(self):
        self.now_s = 0.0
        self.pacer = BurstDraftPacer(clock=lambda: self.now_s)
        self.in_flight = []

    def run(self, num_bursts, *, drafting_s, plain_s, num_reqs=4):
        """The share of bursts that verify drafts."""
        num_drafting = 0
        for _ in range(num_bursts):
            is_drafting = self.pacer.choose(num_reqs)
            num_drafting += is_drafting
            self.in_flight.append(is_drafting)
            if len(self.in_flight) == 2:
                verifies = self.in_flight.pop(0)
                self.now_s += 8 * (drafting_s if verifies else plain_s)
                self.pacer.record_step(
                    num_reqs=num_reqs, num_decode_steps=8, verifies_drafts=verifies
                )
        return num_drafting / num_bursts


@pytest.mark.parametrize("drafting_s", [0.4, 0.8])
def test_useful_drafts_are_verified(drafting_s):
    machine = Machine()
    machine.run(50, drafting_s=drafting_s, plain_s=1.0)
    assert machine.run(400, drafting_s=drafting_s, plain_s=1.0) > 0.9


@pytest.mark.parametrize("drafting_s", [1.3, 4.0])
def test_useless_drafts_cost_less_than_5_percent(drafting_s):
    machine = Machine()
    machine.run(50, drafting_s=drafting_s, plain_s=1.0)
    start_s = machine.now_s
    assert machine.run(400, drafting_s=drafting_s, plain_s=1.0) < 0.1
    assert machine.now_s - start_s < 1.05 * 400 * 8


def test_a_change_is_noticed():
    machine = Machine()
    assert machine.run(300, drafting_s=2.0, plain_s=1.0) < 0.1
    machine.run(300, drafting_s=0.5, plain_s=1.0)
    assert machine.run(100, drafting_s=0.5, plain_s=1.0) > 0.9


def test_steps_of_one_token_are_not_measured():
    """Time without work would count for the first burst after it."""
    machine = Machine()
    machine.pacer.record_step(num_reqs=4, num_decode_steps=1, verifies_drafts=False)
    machine.now_s = 1000.0
    machine.pacer.record_step(num_reqs=4, num_decode_steps=1, verifies_drafts=False)
    assert not machine.pacer.choose(4)
    assert machine.run(300, drafting_s=0.5, plain_s=1.0) > 0.9
