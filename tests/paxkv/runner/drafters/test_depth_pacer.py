"""`DepthPacer`: as many drafts as make the most tokens per second by the measured times."""

import random

import pytest

from paxkv.runner.drafters.depth_pacer import DepthPacer
from paxkv.runner.drafters.step_times import StepTimes


def chances_of(rate, num_drafts):
    return [rate ** (1 + place) for place in range(num_drafts)]


def choose(pacer, chances):
    return pacer.choose(len(chances), lambda: chances)


class Machine:
    """Computes steps in fixed times, and reports them to a pacer.

    Args:
        burst_s: Seconds of a decode step while the engine runs ahead, in bursts of 8.
        draft_s: Seconds of a step by its number of drafts.
        rate: Probability that a draft is right; each step makes the expected number of tokens.
    """

    def __init__(self, *, num_reqs, burst_s, draft_s, rate):
        self.now_s = 0.0
        self.pacer = DepthPacer(max(draft_s), clock=lambda: self.now_s)
        self.num_reqs, self.burst_s, self.draft_s, self.rate = num_reqs, burst_s, draft_s, rate
        self.num_tokens = 0

    @property
    def chances(self):
        return chances_of(self.rate, max(self.draft_s))

    def run(self, num_choices):
        choices = []
        for _ in range(num_choices):
            num_drafts = self.pacer.num_drafts
            num_steps = 1 if num_drafts else 8
            self.now_s += self.draft_s[num_drafts] if num_drafts else 8 * self.burst_s
            tokens_each = sum(self.rate**depth for depth in range(num_drafts + 1))
            num_drawn = self.num_reqs * num_steps * tokens_each
            self.num_tokens += num_drawn
            self.pacer.record_step(
                num_reqs=self.num_reqs,
                num_drawn=num_drawn,
                num_drafts=num_drafts,
                num_decode_steps=num_steps,
                is_decode=True,
            )
            choices.append(choose(self.pacer, [self.chances] * self.num_reqs))
        return choices


def test_useless_drafts_are_only_tried_rarely():
    draft_s = {1: 1.2, 2: 1.4, 3: 1.6}
    machine = Machine(num_reqs=64, burst_s=1.0, draft_s=draft_s, rate=0.02)
    machine.run(100)
    choices = machine.run(1000)
    assert choices.count(0) > 950
    # The time of steps with drafts is measured again now and then.
    assert choices.count(0) < 1000
    assert machine.num_tokens > 0.98 * 64 * machine.now_s


def test_noise_does_not_make_useless_drafts_pay():
    """The measured time of a step is up to 8 times the true one, as on a busy machine."""
    machine = Machine(num_reqs=8, burst_s=1.0, draft_s={1: 1.0, 2: 1.0, 3: 1.0}, rate=0.02)
    rng, read_s, measured_s = random.Random(0), 0.0, 0.0

    def read_clock():
        nonlocal read_s, measured_s
        measured_s += rng.choice([1, 1, 2, 4, 8]) * (machine.now_s - read_s)
        read_s = machine.now_s
        return measured_s

    machine.pacer = DepthPacer(3, clock=read_clock)
    machine.run(100)
    choices = machine.run(1000)
    assert choices.count(0) > 750


@pytest.mark.parametrize(("rate", "best"), [(0.95, 4), (0.6, 2), (0.3, 0)])
def test_number_of_drafts_follows_acceptance_and_times(rate, best):
    draft_s = {1: 1.4, 2: 1.6, 3: 2.0, 4: 2.4}
    machine = Machine(num_reqs=4, burst_s=1.0, draft_s=draft_s, rate=rate)
    choices = machine.run(200)
    assert choices[-50:].count(best) > 40


def test_time_of_bursts_is_known_before_the_first_drafts():
    pacer = DepthPacer(3, clock=iter(range(100)).__next__)
    for num_reqs in (1, 1, 4):
        pacer.record_step(
            num_reqs=num_reqs, num_drawn=num_reqs, num_drafts=0, num_decode_steps=1, is_decode=True
        )
        assert choose(pacer, [chances_of(0.9, 3)] * num_reqs) == 0
    for _ in range(2):
        pacer.record_step(num_reqs=1, num_drawn=1, num_drafts=0, num_decode_steps=1, is_decode=True)
    assert choose(pacer, [chances_of(0.9, 3)]) > 0
    # Another number of requests has another time.
    assert choose(pacer, [chances_of(0.9, 3)] * 4) == 0


def test_times_that_have_changed_are_measured_again():
    machine = Machine(num_reqs=1, burst_s=1.0, draft_s={1: 50.0}, rate=0.9)
    assert machine.run(20)[-1] == 0
    machine.draft_s = {1: 1.1}
    assert machine.run(5000)[-1] == 1
    # The time without drafts is measured again too.
    machine.burst_s = 0.1
    assert machine.run(12_000)[-1] == 0


def test_step_in_flight_after_a_change_is_not_measured():
    pacer = DepthPacer(1, clock=iter([0, 1, 2, 3, 4, 100, 101, 102]).__next__)

    def fetch(num_drafts):
        pacer.record_step(
            num_reqs=1, num_drawn=1, num_drafts=num_drafts, num_decode_steps=1, is_decode=True
        )
        return choose(pacer, [[0.9]])

    assert [fetch(0) for _ in range(5)] == [0, 0, 0, 1, 1]
    # It was decided before the change, so its 96 seconds are not those of a step with a draft.
    assert fetch(0) == 1
    assert [fetch(1), fetch(1)] == [1, 1]


def test_last_request_of_several_is_measured_as_one():
    pacer = DepthPacer(1, clock=iter(range(100)).__next__)
    for num_reqs in (*[2] * 5, *[1] * 5):
        num_drafts = pacer.num_drafts
        pacer.record_step(
            num_reqs=num_reqs,
            num_drawn=num_reqs,
            num_drafts=num_drafts,
            num_decode_steps=1,
            is_decode=True,
        )
        # Two requests decode; one of them then ends without a new choice.
        choose(pacer, [[0.9], [0.9]])
    assert pacer.num_drafts == 1


def test_prompts_are_tried_rarely_while_drafts_do_not_pay():
    machine = Machine(num_reqs=8, burst_s=1.0, draft_s={1: 1.3, 2: 1.6}, rate=0.02)
    assert all(
        machine.pacer.tries_prompts(8, chances_of(0.5, 2)) for _ in range(5)
    )  # no time is known
    machine.run(20)
    tries = [machine.pacer.tries_prompts(8, chances_of(0.02, 2)) for _ in range(320)]
    assert 5 <= sum(tries) <= 16
    # Another acceptance would pay.
    assert all(machine.pacer.tries_prompts(8, chances_of(0.9, 2)) for _ in range(5))


def test_prompts_of_a_part_of_a_batch_are_judged_by_larger_batches():
    """Drafts pay for one request and not for 64; 25 arrive in a step."""
    machine = Machine(num_reqs=1, burst_s=1.0, draft_s={1: 1.1}, rate=0.9)
    assert machine.run(50)[-1] == 1
    machine.num_reqs, machine.draft_s = 64, {1: 3.0}
    assert machine.run(50)[-1] == 0
    assert sum(machine.pacer.tries_prompts(25, [0.9]) for _ in range(32)) <= 1
    assert machine.pacer.tries_prompts(1, [0.9])


@pytest.mark.parametrize(("head_s", "length", "pays"), [(0.1, 4, 1), (4.0, 4, 0), (4.0, 40, 1)])
def test_head_over_prompts_counts_in_proportion_to_the_answers(head_s, length, pays):
    """A step takes 1 s without drafts, and 1.2 s with one, which is right nine times of ten."""
    now_s = 0.0
    pacer = DepthPacer(1, clock=lambda: now_s)
    chosen = []
    for _ in range(30):
        now_s += 5.0
        pacer.record_tokens()
        now_s += head_s
        pacer.record_step(
            num_reqs=1,
            num_prompt_tokens=16,
            num_drawn=1,
            num_drafts=1,
            num_decode_steps=1,
            is_decode=False,
        )
        for _ in range(length):
            num_drafts = choose(pacer, [[0.9]])
            chosen.append(num_drafts)
            now_s += 1.2 if num_drafts else 1.0
            pacer.record_step(
                num_reqs=1,
                num_drawn=1.9 if num_drafts else 1.0,
                num_drafts=num_drafts,
                num_decode_steps=1,
                is_decode=True,
            )
    assert sum(chosen[40:]) / len(chosen[40:]) == pytest.approx(pays, abs=0.1)


def test_time_of_a_burst_counts_for_each_of_its_steps():
    """Bursts of 1, 2 and 6 steps: most steps are in the last one."""
    times = StepTimes()
    for took_s, num_steps in [(3.0, 1), (2.0, 2), (1.0, 6)]:
        times.record(took_s, num_steps)
    assert times.expected_s == 1.0


@pytest.mark.parametrize(("length", "best"), [(9, 0), (81, 3)])
def test_steps_at_the_end_of_answers_that_verify_fewer_drafts_lower_the_gain(length, best):
    """A step with three drafts takes as long as 3.5 tokens. All drafts are right."""
    now_s, chosen = 0.0, []
    pacer = DepthPacer(3, clock=lambda: now_s)
    for _ in range(4000 // length):
        num_left = length
        while num_left:
            num_drafts = choose(pacer, [chances_of(0.99, 3)])
            chosen.append(num_drafts)
            num_verified = min(num_drafts, num_left - 1)
            now_s += 3.5 if num_drafts else 1.0
            num_left -= 1 + num_verified
            pacer.record_step(
                num_reqs=1,
                num_drawn=1 + num_verified,
                num_drafts=num_drafts,
                num_verified=num_verified,
                num_decode_steps=1,
                is_decode=True,
            )
    assert chosen[-300:].count(best) > 240


def test_drafts_that_requests_do_not_get_because_they_end_lower_the_gain():
    """Each step has 3 right drafts, but its requests end after one more token."""
    pacer = DepthPacer(3, clock=iter(range(10_000)).__next__)
    chosen = []
    for _ in range(400):
        num_drafts = choose(pacer, [chances_of(0.95, 3)] * 4)
        chosen.append(num_drafts)
        pacer.record_step(
            num_reqs=4, num_drawn=4, num_drafts=num_drafts, num_decode_steps=1, is_decode=True
        )
    assert chosen[5] > 0 and sum(map(bool, chosen[200:])) < 100


def test_first_step_after_a_choice_of_more_drafts_counts_for_what_it_verifies():
    """One draft and three drafts pay in turn, so each step verifies one, which is right."""
    now_s, chosen = 0.0, [0, 0]
    pacer = DepthPacer(3, clock=lambda: now_s)
    for idx in range(300):
        num_verified = min(chosen[-2:])
        now_s += (1.0, 1.5, 2.0, 2.4)[num_verified]
        pacer.record_step(
            num_reqs=1,
            num_drawn=1 + num_verified,
            num_drafts=chosen[-1],
            num_verified=num_verified,
            num_decode_steps=1,
            is_decode=True,
        )
        is_long = idx < 40 or (idx > 60 and idx % 2)
        chosen.append(choose(pacer, [[1.0, 1.0, 1.0] if is_long else [1.0, 0.0, 0.0]]))
    assert chosen[-100:].count(1) > 40 and chosen[-100:].count(3) > 40


class DeepPacer(DepthPacer):
    """Chooses without any expectation, as pacers of end-to-end tests do."""

    def choose(self, num_reqs, chances):
        self._choices.append(3)
        return 3


def test_steps_are_recorded_before_any_expectation():
    pacer = DeepPacer(3, clock=iter(range(10)).__next__)
    for _ in range(4):
        choose(pacer, [])
        pacer.record_step(num_reqs=1, num_drawn=4, num_drafts=3, num_decode_steps=1, is_decode=True)
    assert pacer.num_drafts == 3


def test_steps_that_take_no_time_on_a_clock_that_ticks_rarely_are_no_error():
    machine = Machine(num_reqs=2, burst_s=0.0, draft_s={1: 0.0, 2: 0.0}, rate=0.5)
    assert 2 in machine.run(50)


def test_drafts_wait_while_steps_with_prompts_hide_their_time():
    machine = Machine(num_reqs=2, burst_s=1.0, draft_s={1: 1.1, 2: 1.2}, rate=0.9)
    assert machine.run(50)[-1] > 0

    def record_prompts():
        machine.now_s += 2.0
        machine.pacer.record_step(
            num_reqs=2,
            num_prompt_tokens=8,
            num_drawn=2,
            num_drafts=machine.pacer.num_drafts,
            num_decode_steps=1,
            num_verified=machine.pacer.num_drafts,
            is_decode=False,
        )
        return choose(machine.pacer, [machine.chances] * 2)

    assert [record_prompts() > 0 for _ in range(4)] == [True, False, False, False]
    assert machine.run(5)[-1] > 0
