"""`BurstDraftPacer`: the bursts with less time per token, and the others now and then."""

import random

import pytest

from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer


class Machine:
    """Computes bursts of 2, 4 and then 8 steps, two in flight, in fixed times per token.

    Args:
        stall_share: Share of the bursts that seem to take a hundred times as long.
    """

    def __init__(self, stall_share=0.0):
        self.now_s = self.true_s = 0.0
        self.num_steps = 0
        self.stall_share, self.rng = stall_share, random.Random(1)
        self.pacer = BurstDraftPacer(clock=lambda: self.now_s)
        self.in_flight = []

    def run(self, num_bursts, *, drafting_s, plain_s, num_reqs=4):
        """The share of bursts that verify drafts."""
        num_drafting = 0
        for _ in range(num_bursts):
            length = min(8, 2 + self.num_steps)
            is_drafting = self.pacer.choose(num_reqs, length)
            num_drafting += is_drafting
            self.num_steps += length
            self.in_flight.append((is_drafting, length))
            if len(self.in_flight) == 2:
                verifies, length = self.in_flight.pop(0)
                took_s = length * (drafting_s if verifies else plain_s)
                self.true_s += took_s
                self.now_s += took_s * (100 if self.rng.random() < self.stall_share else 1)
                self.pacer.record_step(
                    num_reqs=num_reqs, num_decode_steps=length, verifies_drafts=verifies
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


@pytest.mark.parametrize("drafting_s", [1.1, 1.7, 2.5])
@pytest.mark.parametrize("num_reqs", [1, 8, 64])
def test_first_bursts_lose_at_most_5_percent(drafting_s, num_reqs):
    machine = Machine()
    while machine.num_steps < 100:
        machine.run(1, drafting_s=drafting_s, plain_s=1.0, num_reqs=num_reqs)
    num_fetched = machine.num_steps - sum(length for _, length in machine.in_flight)
    assert machine.true_s < 1.05 * num_fetched


@pytest.mark.parametrize(("drafting_s", "is_useful"), [(0.4, True), (2.0, False)])
def test_slow_bursts_do_not_decide(drafting_s, is_useful):
    machine = Machine(stall_share=0.01)
    machine.run(100, drafting_s=drafting_s, plain_s=1.0)
    share = machine.run(1000, drafting_s=drafting_s, plain_s=1.0)
    assert share > 0.8 if is_useful else share < 0.05


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
    assert not machine.pacer.choose(4, 8)
    assert machine.run(300, drafting_s=0.5, plain_s=1.0) > 0.9
