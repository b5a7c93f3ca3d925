"""`DraftPacer`: drafts are verified if, by the measured times, they make more tokens per second."""

import pytest

from paxkv.runner.drafters.draft_pacer import DraftPacer


def chances_of(rate, num_drafts):
    return [rate ** (1 + place) for place in range(num_drafts)]


class Machine:
    """Computes steps in fixed times, and reports them to a pacer.

    Args:
        decode_s: Seconds of a decode step while the engine runs ahead.
        verify_s: Seconds of a step for each of its tokens, in steps of 16, 32, 64 tokens.
        accepted: Drafts of each request that a step accepts.
    """

    def __init__(self, *, num_reqs, decode_s, verify_s, accepted):
        self.now_s = 0.0
        self.pacer = DraftPacer(clock=lambda: self.now_s)
        self.num_reqs, self.decode_s, self.verify_s = num_reqs, decode_s, verify_s
        self.accepted = accepted
        self.choice = None
        self.num_tokens = 0
        self.has_prompts = False  # of other requests, in each step

    def run(self, num_steps, *, num_proposed=4, rate=0.5, num_proposing=None):
        """Choices after each step. Every request has proposals, or the first of them have."""
        choices = []
        for _ in range(num_steps):
            drafts = {} if self.choice is None else self.choice.drafts
            num_drafts = sum(map(len, drafts.values()))
            if self.choice is None or self.choice.is_ahead:
                took_s = self.decode_s
            elif drafts:
                size = max(8, 1 << (self.num_reqs + num_drafts - 1).bit_length())
                took_s = self.verify_s[size]
            else:
                took_s = 1.2 * self.decode_s
            self.now_s += took_s
            num_drawn = self.num_reqs + sum(min(self.accepted, len(d)) for d in drafts.values())
            self.num_tokens += num_drawn
            self.pacer.record_step(
                num_reqs=self.num_reqs,
                num_drafts=num_drafts,
                num_drawn=num_drawn,
                num_decode_steps=1,
                is_decode=not self.has_prompts,
            )
            proposing = range(self.num_reqs if num_proposing is None else num_proposing)
            proposals = {f"r{i}": [*range(num_proposed)] for i in proposing if num_proposed}
            chances = {req_id: chances_of(rate, num_proposed) for req_id in proposals}
            self.choice = self.pacer.choose(self.num_reqs, proposals, chances)
            choices.append(self.choice)
        return choices


def is_verifying(choice):
    return bool(choice.drafts)


def test_first_steps_have_no_drafts_so_that_their_time_is_known():
    machine = Machine(num_reqs=1, decode_s=1.0, verify_s={8: 1.1}, accepted=4)
    choices = machine.run(20, rate=0.9)
    assert choices[0].is_ahead and not is_verifying(choices[0])
    assert all(map(is_verifying, choices[3:]))


def test_drafts_that_cost_more_than_they_gain_are_not_verified():
    machine = Machine(num_reqs=16, decode_s=1.0, verify_s={16: 1, 32: 2, 64: 4, 128: 8}, accepted=0)
    choices = machine.run(1000, rate=0.1)
    assert sum(map(is_verifying, choices)) < 20
    # At most 5 % slower than without drafts.
    assert machine.num_tokens > 0.95 * 16 * machine.now_s


@pytest.mark.parametrize(("rate", "num_drafts"), [(0.9, 4), (0.6, 1)])
def test_likely_drafts_come_first_and_fill_a_step(rate, num_drafts):
    # 12 requests leave room for 4 drafts in a step of 16 tokens. Larger steps are not worth it.
    machine = Machine(
        num_reqs=12, decode_s=1.0, verify_s={16: 1.05, 32: 10.0, 64: 20.0}, accepted=1
    )
    # The first larger step costs as much time as drafts may cost in several hundred steps.
    machine.run(600, num_proposing=2, rate=0.9)
    # Go on until the time of a step without drafts has just been measured again.
    for is_before in (True, False):
        while is_verifying(machine.run(1, num_proposing=2, rate=0.9)[-1]) == is_before:
            pass
    chances = {"likely": chances_of(rate, 4), "unlikely": chances_of(0.5, 4)}
    proposals = {"likely": [1, 2, 3, 4], "unlikely": [5, 6, 7, 8]}
    drafts = machine.pacer.choose(12, proposals, chances).drafts
    assert sum(map(len, drafts.values())) == 4
    assert len(drafts["likely"]) >= num_drafts
    assert drafts["likely"] == proposals["likely"][: len(drafts["likely"])]


def test_engine_waits_for_more_drafts_only_while_they_pay():
    machine = Machine(num_reqs=1, decode_s=1.0, verify_s={8: 1.1}, accepted=4)
    machine.run(40, rate=0.9)
    choices = machine.run(60, num_proposed=0)
    assert not choices[0].is_ahead
    assert choices[-1].is_ahead
    # Drafts are verified again after the engine has made up for the time of the wait.
    assert is_verifying(machine.run(300, rate=0.9)[-1])


def test_times_that_have_changed_are_measured_again():
    machine = Machine(num_reqs=1, decode_s=1.0, verify_s={8: 50.0}, accepted=4)
    assert not is_verifying(machine.run(20, rate=0.9)[-1])
    machine.verify_s = {8: 1.1}
    assert is_verifying(machine.run(3000, rate=0.9)[-1])
    # Steps without drafts are measured again too.
    machine.decode_s = 0.1
    assert not is_verifying(machine.run(12_000, rate=0.9)[-1])


def test_drafts_wait_while_steps_with_prompts_hide_their_time():
    machine = Machine(num_reqs=2, decode_s=1.0, verify_s={8: 1.1, 16: 1.2}, accepted=4)
    assert any(map(is_verifying, machine.run(40, rate=0.9)[-5:]))
    machine.has_prompts = True
    assert not any(map(is_verifying, machine.run(20, rate=0.9)[3:]))
    machine.has_prompts = False
    assert any(map(is_verifying, machine.run(40, rate=0.9)))


def test_steps_that_take_no_time_on_a_clock_that_ticks_rarely_are_no_error():
    machine = Machine(num_reqs=2, decode_s=0.0, verify_s={8: 0.0, 16: 0.0}, accepted=0.5)
    assert any(map(is_verifying, machine.run(50)))
