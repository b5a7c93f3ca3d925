"""Drafts from tokens alone change no answer, under random settings of the engine."""

import random

import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.speculative_config import SuffixLimits
from paxkv.runner import model_runner
from paxkv.runner.drafters.base import Drafter
from paxkv.runner.drafters.draft_pacer import DraftChoice, DraftPacer
from paxkv.runner.drafters.ngram import NgramDrafter
from paxkv.runner.drafters.suffix import SuffixDrafter, SuffixRequest
from paxkv.runner.features.drafts import Drafts
from paxkv.runner.features.feature_list import make_features
from tests.end_to_end.engine_runs import run
from tests.end_to_end.test_drafts import REQUESTS, check_equal, make_request
from tests.end_to_end.test_drafts import compiler as compiler
from tests.paxkv.runner.shared_runners import make_warm_runner
from tests.paxkv.runner.tiny_model import TinyModel

MAX_DRAFTS = 3
ALL_REQUESTS = [
    *REQUESTS,
    # Answers that repeat themselves, so that drafts are accepted.
    make_request("loop", 4, ignore_eos=True, max_tokens=30, allowed_token_ids=[7, 8]),
    make_request("loop_logprobs", 6, ignore_eos=True, max_tokens=30, logprobs=2, top_k=1),
    make_request("one_word", 9, temperature=1.0, seed=8, max_tokens=25, allowed_token_ids=[9]),
]


class RandomPacer(DraftPacer):
    """Changes between drafts, waiting and running ahead, at random.

    Attributes:
        draft_share, ahead_share: Of the decisions; the others wait.
        num_chosen: Drafts that it has chosen.
    """

    def __init__(self):
        super().__init__()
        self.rng = random.Random(0)
        self.draft_share, self.ahead_share, self.num_chosen = 1.0, 0.0, 0

    def choose(self, num_reqs, proposals, chances):
        kind = self.rng.random()
        if kind >= self.draft_share:
            return DraftChoice(drafts={}, is_ahead=kind < self.draft_share + self.ahead_share)
        drafts = {
            req_id: token_ids[: self.rng.randint(1, MAX_DRAFTS)]
            for req_id, token_ids in proposals.items()
        }
        self.num_chosen += sum(map(len, drafts.values()))
        return DraftChoice(drafts=drafts, is_ahead=not drafts)


class ChangingDrafter(Drafter):
    """Drafters that share a runner, because its programs are the same for all.

    Attributes:
        method: Of new requests.
    """

    def __init__(self):
        self.method = "ngram"
        self._drafters = {
            "ngram": NgramDrafter(shortest=1, longest=3),
            "suffix": SuffixDrafter(SuffixLimits(), max_cached_tokens=200),
        }

    def start(self, token_ids):
        return self._drafters[self.method].start(token_ids)

    def end(self, request):
        method = "suffix" if isinstance(request, SuffixRequest) else "ngram"
        self._drafters[method].end(request)


@pytest.fixture(scope="module")
def pacer():
    return RandomPacer()


@pytest.fixture(scope="module")
def drafter():
    return ChangingDrafter()


@pytest.fixture(params=["ngram", "suffix"], autouse=True)
def method(request, drafter):
    drafter.method = request.param
    return request.param


# The tests of `test_drafts` run batch-invariant steps too.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="steps"),
        pytest.param(True, id="batch_invariant", marks=pytest.mark.slow),
    ],
)
def drafting(request, pacer, drafter):
    """A runner with drafts, and the steps of a burst."""
    config = RunnerConfig(batch_invariant=request.param, max_logprobs=-1)
    drafts = Drafts(drafter, max_drafts=MAX_DRAFTS, pacer=pacer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "make_features", lambda *args: (*make_features(*args), drafts))
        runner = make_warm_runner(TinyModel(seed=2), config).runner
    # There are no bursts with batch_invariant.
    return runner, 1 if request.param else 8


@pytest.fixture(scope="module")
def truth(drafting, pacer, compiler):
    """The answer of each request alone, without drafts.

    `test_burst_head_drafts` compares with a runner that cannot verify drafts.
    """
    pacer.draft_share, pacer.ahead_share = 0.0, 1.0
    answers = {
        request.request_id: run(drafting[0], [request], compiler=compiler)[0][request.request_id]
        for request in ALL_REQUESTS
    }
    assert all(answer.num_draft_tokens == 0 for answer in answers.values())
    return answers


def check_random_run(drafting, pacer, compiler, truth, seed):
    """Prefix hits, few blocks, chunked prompts, arrivals, async scheduling and bursts."""
    pacer.rng = rng = random.Random(seed)
    pacer.draft_share = rng.choice((1.0, 0.7, 0.3))
    pacer.ahead_share = rng.random() * (1 - pacer.draft_share)
    requests = rng.sample(ALL_REQUESTS, rng.randint(1, len(ALL_REQUESTS)))
    num_arrivals = rng.randint(0, len(requests) - 1)
    runner, max_decode_burst = drafting
    answers, _ = run(
        runner,
        requests,
        compiler=compiler,
        max_drafts=MAX_DRAFTS,
        is_async=rng.random() < 0.5,
        num_blocks=rng.choice([None, 8]),
        caching=rng.random() < 0.5,
        max_decode_burst=rng.choice([1, max_decode_burst]),
        arrivals=sorted(rng.choices(range(30), k=num_arrivals)),
    )
    for req_id, answer in answers.items():
        check_equal(answer, truth[req_id])
    assert runner.num_compiles_after_ready == 0


@pytest.mark.parametrize("seed", range(6))
def test_drafts_change_no_answer(drafting, pacer, compiler, truth, seed):
    pacer.num_chosen = 0
    check_random_run(drafting, pacer, compiler, truth, seed)
    assert pacer.num_chosen > 0


@pytest.mark.slow
def test_drafts_change_no_answer_in_300_runs(drafting, pacer, compiler, truth):
    for seed in range(1000, 1300):
        check_random_run(drafting, pacer, compiler, truth, seed)
