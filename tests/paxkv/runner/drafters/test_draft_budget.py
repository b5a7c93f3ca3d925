"""`DraftBudget`: drafts cost at most 5 % of the tokens per second, whatever share is right."""

import dataclasses
import itertools
import random
import statistics

import pytest

from paxkv.runner.drafters.base import Drafter, RequestDrafter
from paxkv.runner.drafters.depth_pacer import DepthPacer
from paxkv.runner.drafters.draft_budget import DraftBudget
from paxkv.runner.drafters.draft_pacer import DraftPacer
from paxkv.runner.features.drafts import Drafts
from paxkv.runner.features.head_drafts import HeadDrafts
from tests.paxkv.runner.drafters.simulated_engine import (
    Machine,
    SimulatedEngine,
    SimulatedHeadEngine,
)

MAX_DRAFTS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    machine: Machine
    burst_len: int


SETTINGS = {
    # Reading the weights takes most of the time.
    "gpu": Setting(machine=Machine(step_s=1.0, row_s=0.005, host_s=0.15), burst_len=8),
    "cpu": Setting(machine=Machine(step_s=1.0, row_s=0.08, host_s=0.15), burst_len=1),
    # Each token costs the same, so no draft pays.
    "full": Setting(machine=Machine(step_s=0.1, row_s=1.0, host_s=0.1), burst_len=1),
}
# Tokens of each request, by a key of `SHARES` and the number of requests. Slow tests simulate more.
NUM_TOKENS = {"few": {1: 1000, 8: 600, 64: 300}, "all": {1: 2000, 8: 800, 64: 400}}


def count_right(rng, rate):
    return next(n for n in range(MAX_DRAFTS + 1) if n == MAX_DRAFTS or rng.random() > rate)


# Right drafts of a proposal, by the number of tokens that the request has.
NUM_RIGHT = {
    "none": lambda num_tokens, rng: 0,
    "first": lambda num_tokens, rng: 1,
    "first two": lambda num_tokens, rng: 2,
    "phases": lambda num_tokens, rng: MAX_DRAFTS * (num_tokens // 200 % 2),
    "quarter": lambda num_tokens, rng: count_right(rng, 0.25),
    "half": lambda num_tokens, rng: count_right(rng, 0.5),
    "all": lambda num_tokens, rng: MAX_DRAFTS,
}

# Names in `NUM_RIGHT`: how many drafts are right. In the normal run, long simulations have "few",
# which are those with the largest costs.
SHARES = {"few": ("none", "first two", "phases", "quarter"), "all": tuple(NUM_RIGHT)}


class TextRequest(RequestDrafter):
    def __init__(self, num_tokens, num_right, rng):
        self.num_tokens, self.num_right, self.rng = num_tokens, num_right, rng

    def extend(self, token_ids):
        self.num_tokens += len(token_ids)

    def propose(self, max_drafts):
        num_right = self.num_right(self.num_tokens, self.rng)
        right = [*range(self.num_tokens, self.num_tokens + num_right)]
        return right + [-1] * (max_drafts - num_right)


class TextDrafter(Drafter):
    def __init__(self, num_right):
        self.num_right, self.rng = num_right, random.Random(1)

    def start(self, token_ids):
        return TextRequest(len(token_ids), self.num_right, self.rng)

    def end(self, request):
        pass


def make_engine(setting, num_right, *, seed=0, has_states=False, **arguments):
    def make_feature(clock):
        drafter = TextDrafter(num_right)
        return Drafts(drafter, max_drafts=MAX_DRAFTS, pacer=DraftPacer(clock=clock))

    return SimulatedEngine(
        setting.machine,
        make_feature,
        has_states=has_states,
        burst_len=setting.burst_len,
        seed=seed,
        **arguments,
    )


def make_head_engine(setting, num_right, *, seed=0, **arguments):
    def make_feature(clock):
        pacer = DepthPacer(MAX_DRAFTS, clock=clock)
        return HeadDrafts(None, max_drafts=MAX_DRAFTS, pacer=pacer)

    engine = SimulatedHeadEngine(
        setting.machine, make_feature, burst_len=setting.burst_len, seed=seed, **arguments
    )
    engine.num_right = num_right
    return engine


def measure_gain(setting, num_right, *, num_reqs, num_tokens=None, make=make_engine, **arguments):
    """Returns tokens per second, compared with an engine without drafts.

    Args:
        num_tokens: Tokens of each request. None: those of `NUM_TOKENS["few"]`.
    """
    engine = make(setting, num_right, **arguments)
    plain_rate = num_reqs / setting.machine.mean_s(num_reqs)
    return engine.run(num_tokens or NUM_TOKENS["few"][num_reqs], num_reqs=num_reqs) / plain_rate


def measure_head_gain(setting, num_right, **arguments):
    """As `measure_gain`, with a head."""
    return measure_gain(setting, num_right, make=make_head_engine, **arguments)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def long_cases(normal, others):
    """The normal run has the `normal` cases with few shares; slow tests have all cases with all."""
    return [*((*case, "few") for case in normal), *(slow(*case, "all") for case in normal + others)]


@pytest.mark.parametrize(
    ("setting", "num_reqs", "shares"),
    long_cases([("gpu", 8), ("cpu", 64)], [("gpu", 1), ("cpu", 1), ("full", 8)]),
)
def test_drafts_of_a_head_cost_at_most_5_percent(setting, num_reqs, shares):
    gains = {
        name: measure_head_gain(
            SETTINGS[setting],
            NUM_RIGHT[name],
            num_reqs=num_reqs,
            num_tokens=NUM_TOKENS[shares][num_reqs],
        )
        for name in SHARES[shares]
    }
    assert min(gains.values()) > 0.95, gains


@pytest.mark.parametrize(
    ("setting", "num_reqs", "has_states", "shares"),
    long_cases(
        [("gpu", 1, True), ("gpu", 8, False), ("cpu", 64, False), ("full", 1, False)],
        [
            *(("gpu", 8, True), ("cpu", 64, True), ("full", 1, True), ("gpu", 1, False)),
            *(("cpu", *case) for case in itertools.product((1, 8), (False, True))),
            *(("full", 8, has_states) for has_states in (False, True)),
        ],
    ),
)
def test_drafts_cost_at_most_5_percent(setting, num_reqs, has_states, shares):
    gains = {
        name: measure_gain(
            SETTINGS[setting],
            NUM_RIGHT[name],
            num_reqs=num_reqs,
            num_tokens=NUM_TOKENS[shares][num_reqs],
            has_states=has_states,
        )
        for name in SHARES[shares]
    }
    assert min(gains.values()) > 0.95, gains


@pytest.mark.parametrize(
    ("setting", "num_reqs", "wanted"), [("gpu", 1, 3.0), ("gpu", 8, 2.0), ("cpu", 1, 2.0)]
)
def test_right_drafts_gain(setting, num_reqs, wanted):
    for has_states in (False, True):
        gain = measure_gain(
            SETTINGS[setting], NUM_RIGHT["all"], num_reqs=num_reqs, has_states=has_states
        )
        assert gain > wanted


@pytest.mark.parametrize("measure", [measure_gain, measure_head_gain])
@pytest.mark.parametrize(
    ("setting", "num_reqs"),
    [
        *(("gpu", 1), ("gpu", 8), slow("gpu", 64)),
        *(("cpu", 1), slow("cpu", 8), ("cpu", 64), ("full", 8)),
    ],
)
def test_first_hundred_steps_lose_at_most_5_percent(setting, num_reqs, measure):
    gains = [
        measure(SETTINGS[setting], NUM_RIGHT["none"], num_reqs=num_reqs, num_tokens=100, seed=seed)
        for seed in range(4)
    ]
    # The first steps of a single run may be unusually slow or fast.
    assert statistics.harmonic_mean(gains) > 1 / 1.05, gains
    assert min(gains) > 0.92, gains


@pytest.mark.parametrize("names", [("none", "half"), slow(("quarter", "all"))])
@pytest.mark.parametrize("make", [make_engine, make_head_engine])
@pytest.mark.parametrize("setting", ["gpu", "cpu", "full"])
def test_drafts_cost_at_most_5_percent_while_many_requests_arrive(setting, make, names):
    setting = SETTINGS[setting]
    plain = SimulatedEngine(
        setting.machine, lambda clock: None, burst_len=setting.burst_len, max_tokens=256
    )
    plain_s = plain.answer(32, num_reqs=64, num_prompt_tokens=64)
    gains = {}
    for name in names:
        engine = make(setting, NUM_RIGHT[name], max_tokens=256)
        took_s = [engine.answer(32, num_reqs=64, num_prompt_tokens=64) for _ in range(4)]
        gains[name] = len(took_s) * plain_s / sum(took_s)
    assert min(gains.values()) > 0.95, gains


@pytest.mark.parametrize("measure", [measure_gain, measure_head_gain])
@pytest.mark.parametrize("setting", ["gpu", "cpu"])
def test_right_drafts_gain_in_the_first_hundred_steps(setting, measure):
    gains = [
        measure(SETTINGS[setting], NUM_RIGHT["all"], num_reqs=1, num_tokens=250, seed=seed)
        for seed in range(4)
    ]
    assert statistics.harmonic_mean(gains) > 1.5, gains


def with_stalls(setting):
    machine = dataclasses.replace(setting.machine, stall_share=0.01, stall_factor=100.0)
    return dataclasses.replace(setting, machine=machine)


@pytest.mark.parametrize("measure", [measure_gain, measure_head_gain])
@pytest.mark.parametrize("setting", ["gpu", "cpu"])
def test_steps_that_take_a_hundred_times_as_long_do_not_stop_right_drafts(setting, measure):
    gains = [
        measure(with_stalls(SETTINGS[setting]), NUM_RIGHT["all"], num_reqs=1, seed=seed)
        for seed in range(4)
    ]
    assert min(gains) > 1.5, gains


@pytest.mark.parametrize("measure", [measure_gain, measure_head_gain])
@pytest.mark.parametrize(("setting", "num_reqs"), [("gpu", 1), ("cpu", 8), ("full", 64)])
def test_steps_that_take_a_hundred_times_as_long_do_not_make_wrong_drafts_pay(
    setting, num_reqs, measure
):
    gains = [
        measure(
            with_stalls(SETTINGS[setting]),
            NUM_RIGHT["none"],
            num_reqs=num_reqs,
            num_tokens=300,
            seed=seed,
        )
        for seed in range(2)
    ]
    assert min(gains) > 0.95, gains


def test_budget_is_spent_by_a_dear_step_and_comes_back():
    budget = DraftBudget()
    for _ in range(100):
        budget.record_plain(4, 1.0, 1)
    # The tokens of three steps, in the time of eight.
    budget.record_drafting(4, 8.0, num_drawn=12, num_rows=32)
    assert budget.is_spent
    budget.record_plain(4, 400.0, 400)
    assert not budget.is_spent


def test_drafts_wait_while_steps_with_prompts_hide_their_time():
    budget = DraftBudget()
    budget.record_plain(1, 100.0, 100)
    budget.record_unmeasured()
    assert budget.affords_drafts
    budget.record_unmeasured()
    # The head may still compute prompts, because the time for these is measured.
    assert not budget.affords_drafts and budget.affords_prompts
    budget.record_plain(1, 1.0, 1)
    assert budget.affords_drafts


@pytest.mark.parametrize("num_before", range(100, 109))
def test_first_step_after_drafts_changes_the_average_time(num_before):
    budget = DraftBudget()
    for _ in range(num_before):
        budget.record_plain(1, 1.0, 1)
    budget.record_drafting(1, 1.0, num_drawn=1, num_rows=2)
    budget.record_plain(1, 2.0, 1)
    assert budget.plain_s(1) == pytest.approx(26 / 25)


def test_earlier_gain_pays_for_little():
    budget = DraftBudget()
    budget.record_plain(1, 10.0, 10)
    for _ in range(1000):
        budget.record_drafting(1, 1.0, num_drawn=5, num_rows=5)
    num_wrong = 0
    while not budget.is_spent:
        budget.record_drafting(1, 2.0, num_drawn=1, num_rows=5)
        num_wrong += 1
    assert num_wrong < 0.05 * 1000


def test_head_over_prompts_is_paid_by_its_share_of_the_time_or_by_gains():
    budget = DraftBudget()
    budget.record_plain(1, 100.0, 100)
    budget.record_prompts(4.0)
    assert not budget.affords_prompts and not budget.is_spent
    # Two steps draw the tokens of six.
    for _ in range(2):
        budget.record_drafting(1, 1.0, num_drawn=3, num_rows=4)
    assert budget.affords_prompts
    budget.record_prompts(4.0)
    assert not budget.affords_prompts
    budget.record_plain(1, 100.0, 100)
    assert budget.affords_prompts


def test_slow_step_counts_in_part():
    budget = DraftBudget()
    budget.record_plain(1, 200.0, 200)
    budget.record_drafting(1, 100.0, num_drawn=1, num_rows=2)
    # The step counts as three steps without drafts at most. One of them is not lost.
    assert not budget.is_spent
    for _ in range(3):
        budget.record_drafting(1, 100.0, num_drawn=1, num_rows=2)
    assert budget.is_spent
