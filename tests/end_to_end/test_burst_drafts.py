"""Bursts that find and verify drafts change no answer, under random settings of the engine."""

import dataclasses
import random

import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.runner import model_runner
from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer
from paxkv.runner.drafters.ngram import NgramDrafter
from paxkv.runner.features.drafts import Drafts
from paxkv.runner.features.feature_list import make_features
from tests.end_to_end.engine_runs import run
from tests.end_to_end.test_drafts import check_equal
from tests.end_to_end.test_drafts import compiler as compiler
from tests.end_to_end.test_host_drafts import ALL_REQUESTS, MAX_DRAFTS, RandomPacer
from tests.paxkv.runner.shared_runners import make_warm_runner
from tests.paxkv.runner.tiny_model import TinyModel

CONFIG = SpeculativeConfig(
    method="ngram",
    num_speculative_tokens=MAX_DRAFTS,
    prompt_lookup_min=1,
    prompt_lookup_max=3,
    drafts_in_bursts=True,
)
MAX_DECODE_BURST = 8
# They need the host between their tokens, so the engine verifies their drafts in single steps.
IN_STEPS = [
    request
    for request in ALL_REQUESTS
    if request.needs_grammar or request.is_pooled or request.sampling_params.logprobs == -1
]
IN_BURSTS = [request for request in ALL_REQUESTS if request not in IN_STEPS]


class RandomBurstPacer(BurstDraftPacer):
    """Chooses some bursts at random.

    Attributes:
        share: Of the bursts that verify drafts.
        num_chosen: Bursts that it has chosen.
    """

    def __init__(self):
        super().__init__()
        self.rng = random.Random(0)
        self.share, self.num_chosen = 1.0, 0

    def choose(self, num_reqs, num_decode_steps):
        is_chosen = self.rng.random() < self.share
        self.num_chosen += is_chosen
        return is_chosen


@pytest.fixture(scope="module")
def pacers():
    return RandomPacer(), RandomBurstPacer()


@pytest.fixture(scope="module")
def runners(pacers):
    """A runner whose pacer chooses bursts, and one with the same programs that chooses all."""
    config = RunnerConfig(max_logprobs=-1, speculative_config=CONFIG)
    found = []
    for burst_pacer in (pacers[1], None):
        drafts = Drafts(
            NgramDrafter(shortest=1, longest=3),
            max_drafts=MAX_DRAFTS,
            pacer=pacers[0],
            are_in_bursts=True,
            burst_pacer=burst_pacer,
        )

        def make(config, model, added=drafts):
            config = dataclasses.replace(config, speculative_config=None)
            return *make_features(config, model), added

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_runner, "make_features", make)
            # `test_drafting_burst.py` runs bursts for fewer requests than the engine has rows.
            found.append(make_warm_runner(TinyModel(seed=2), config, has_few_sizes=True).runner)
    return found


@pytest.fixture(scope="module")
def truth(runners, pacers, compiler):
    """The answer of each request alone, without bursts and drafts."""
    pacers[0].draft_share, pacers[0].ahead_share = 0.0, 1.0
    answers = {
        request.request_id: run(runners[0], [request], compiler=compiler)[0][request.request_id]
        for request in ALL_REQUESTS
    }
    assert all(answer.num_draft_tokens == 0 for answer in answers.values())
    return answers


def check_random_run(runners, pacers, compiler, truth, seed):
    """Returns the number of drafts that were verified, and that of accepted ones."""
    rng = random.Random(seed)
    pacer, burst_pacer = pacers
    pacer.rng = burst_pacer.rng = rng
    pacer.draft_share = pacer.ahead_share = 0.5
    burst_pacer.share = rng.choice((1.0, 0.5))
    pool = rng.choice((IN_BURSTS, IN_BURSTS, ALL_REQUESTS))
    requests = rng.sample(pool, rng.randint(1, len(pool)))
    num_arrivals = rng.randint(0, len(requests) - 1)
    runner = rng.choice(runners)
    answers, _ = run(
        runner,
        requests,
        compiler=compiler,
        max_drafts=MAX_DRAFTS,
        is_async=rng.random() < 0.7,
        num_blocks=rng.choice([None, 8]),
        caching=rng.random() < 0.5,
        max_decode_burst=rng.choice([3, MAX_DECODE_BURST]),
        arrivals=sorted(rng.choices(range(15), k=num_arrivals)),
    )
    for req_id, answer in answers.items():
        check_equal(answer, truth[req_id])
        assert answer.num_accepted_tokens <= answer.num_draft_tokens
    assert runner.num_compiles_after_ready == 0
    counts = [(a.num_draft_tokens, a.num_accepted_tokens) for a in answers.values()]
    return tuple(map(sum, zip(*counts, strict=True)))


@pytest.mark.parametrize("seed", range(6))
def test_drafts_in_bursts_change_no_answer(runners, pacers, compiler, truth, seed):
    num_drafts, _ = check_random_run(runners, pacers, compiler, truth, seed)
    assert num_drafts > 0


@pytest.mark.slow
def test_drafts_in_bursts_change_no_answer_in_300_runs(runners, pacers, compiler, truth):
    counts = [
        check_random_run(runners, pacers, compiler, truth, seed) for seed in range(1000, 1300)
    ]
    print(*map(sum, zip(*counts, strict=True)))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("max_decode_burst", [2, MAX_DECODE_BURST])
def test_a_repeated_token_is_accepted_in_bursts(runners, truth, is_async, max_decode_burst):
    """Drafts of bursts of two tokens come from the tokens of earlier bursts."""
    (request,) = [request for request in ALL_REQUESTS if request.request_id == "one_word"]
    answers, _ = run(
        runners[1],
        [request],
        max_drafts=MAX_DRAFTS,
        is_async=is_async,
        max_decode_burst=max_decode_burst,
    )
    answer = answers["one_word"]
    check_equal(answer, truth["one_word"])
    assert answer.num_accepted_tokens >= 5


def test_a_request_with_a_grammar_has_drafts_in_steps(runners, pacers, compiler, truth):
    pacers[0].draft_share, pacers[1].num_chosen = 1.0, 0
    request = next(request for request in IN_STEPS if request.needs_grammar)
    answers, _ = run(
        runners[0],
        [request],
        compiler=compiler,
        max_drafts=MAX_DRAFTS,
        is_async=True,
        max_decode_burst=MAX_DECODE_BURST,
    )
    check_equal(answers[request.request_id], truth[request.request_id])
    assert answers[request.request_id].num_draft_tokens > 0
    assert pacers[1].num_chosen == 0
