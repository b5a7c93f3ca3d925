"""N-gram drafts change no answer, under random settings of the engine."""

import random

import pytest

from paxkv.config.engine_config import RunnerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from tests.end_to_end.engine_runs import run
from tests.end_to_end.test_drafts import REQUESTS, check_equal, make_request
from tests.end_to_end.test_drafts import compiler as compiler
from tests.paxkv.runner.shared_runners import make_warm_runner
from tests.paxkv.runner.tiny_model import TinyModel

MAX_DRAFTS = 3
SPECULATIVE = SpeculativeConfig(
    method="ngram", num_speculative_tokens=MAX_DRAFTS, prompt_lookup_min=1, prompt_lookup_max=3
)
ALL_REQUESTS = [
    *REQUESTS,
    # Answers that repeat themselves, so that drafts are accepted.
    make_request("loop", 4, ignore_eos=True, max_tokens=30, allowed_token_ids=[7, 8]),
    make_request("loop_logprobs", 6, ignore_eos=True, max_tokens=30, logprobs=2, top_k=1),
    make_request("one_word", 9, temperature=1.0, seed=8, max_tokens=25, allowed_token_ids=[9]),
]


@pytest.fixture(scope="module", params=[False, True], ids=["steps", "batch_invariant"])
def runners(request, tmp_path_factory):
    """A runner without drafts and one with them; both have the same weights."""
    found = []
    for speculative in (None, SPECULATIVE):
        config = RunnerConfig(
            batch_invariant=request.param, max_logprobs=-1, speculative_config=speculative
        )
        name = f"ngram_{request.param}_{speculative is not None}"
        folder = tmp_path_factory.mktemp("programs") / name
        found.append(make_warm_runner(folder, TinyModel(seed=2), config).runner)
    return found


@pytest.fixture(scope="module")
def truth(runners, compiler):
    """The answer of each request alone, in an engine without drafts."""
    return {
        request.request_id: run(runners[0], [request], compiler=compiler)[0][request.request_id]
        for request in ALL_REQUESTS
    }


def check_random_run(runners, compiler, truth, seed):
    """Prefix hits, few blocks, chunked prompts, arrivals, async scheduling and bursts."""
    rng = random.Random(seed)
    requests = rng.sample(ALL_REQUESTS, rng.randint(1, len(ALL_REQUESTS)))
    num_arrivals = rng.randint(0, len(requests) - 1)
    answers, _ = run(
        runners[1],
        requests,
        compiler=compiler,
        max_drafts=MAX_DRAFTS,
        is_async=rng.random() < 0.5,
        num_blocks=rng.choice([None, 8]),
        caching=rng.random() < 0.5,
        max_decode_burst=rng.choice([1, 8]),
        arrivals=sorted(rng.choices(range(30), k=num_arrivals)),
    )
    for req_id, answer in answers.items():
        check_equal(answer, truth[req_id])
    assert runners[1].num_compiles_after_ready == 0


@pytest.mark.parametrize("seed", range(12))
def test_drafts_change_no_answer(runners, compiler, truth, seed):
    check_random_run(runners, compiler, truth, seed)


@pytest.mark.slow
def test_drafts_change_no_answer_in_300_runs(runners, compiler, truth):
    for seed in range(1000, 1300):
        check_random_run(runners, compiler, truth, seed)
