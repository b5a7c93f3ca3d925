"""Drafts of a head for multi-token prediction change no answer, under random settings."""

import dataclasses
import random
from collections import defaultdict

import pytest

from models import load_model
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_mtp_head
from paxkv.config.engine_config import RunnerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.runner.batch.device_step import DeviceStep
from tests.end_to_end.engine_runs import run
from tests.end_to_end.mtp_checkpoints import make_agreeing_checkpoint
from tests.end_to_end.test_drafts import REQUESTS, check_equal, make_request
from tests.end_to_end.test_drafts import compiler as compiler
from tests.models.drafters.head_stepper import HeadStepper
from tests.paxkv.runner.features.test_prompt_logprobs import prompt
from tests.paxkv.runner.shared_runners import MAX_MODEL_LEN, make_warm_runner
from tests.paxkv.runner.tiny_model import VOCAB

MAX_DRAFTS = 3
ALL_REQUESTS = [
    *REQUESTS,
    make_request("long", 4, ignore_eos=True, max_tokens=34),
    make_request("long_sampled", 6, ignore_eos=True, max_tokens=30, temperature=0.5, seed=4),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp") / "checkpoint"
    make_agreeing_checkpoint(folder, family="deepseek-v3", seed=1, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def head(model, checkpoint):
    return load_mtp_head(model, checkpoint, encoder=KernelEncoder(platform=model.platform))


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["steps", "batch_invariant"],
)
def runners(request, tmp_path_factory, model, head):
    """A runner without drafts, and one with the same weights and a head."""
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=MAX_DRAFTS)
    found = []
    for own_head in (None, head):
        folder = tmp_path_factory.mktemp("programs") / "mtp"
        config = RunnerConfig(
            batch_invariant=request.param,
            max_logprobs=-1,
            speculative_config=None if own_head is None else speculative,
        )
        found.append(make_warm_runner(folder, model, config, head=own_head).runner)
    return found


@pytest.fixture(scope="module")
def truth(runners, compiler):
    """The answer of each request alone, in an engine without drafts."""
    return {
        request.request_id: run(runners[0], [request], compiler=compiler)[0][request.request_id]
        for request in ALL_REQUESTS
    }


def run_with_drafts(runner, requests, compiler, **settings):
    return run(
        runner, requests, compiler=compiler, max_drafts=MAX_DRAFTS, use_eagle=True, **settings
    )


def check_random_run(runner, compiler, truth, seed):
    """Prefix hits, few blocks, chunked prompts, arrivals and async scheduling."""
    rng = random.Random(seed)
    requests = rng.sample(ALL_REQUESTS, rng.randint(1, len(ALL_REQUESTS)))
    num_arrivals = rng.randint(0, len(requests) - 1)
    answers, _ = run_with_drafts(
        runner,
        requests,
        compiler,
        is_async=rng.random() < 0.5,
        num_blocks=rng.choice([None, 8]),
        caching=rng.random() < 0.5,
        arrivals=sorted(rng.choices(range(30), k=num_arrivals)),
    )
    for req_id, answer in answers.items():
        check_equal(answer, truth[req_id])
    assert runner.num_compiles_after_ready == 0


@pytest.mark.parametrize("seed", range(6))
def test_drafts_change_no_answer(runners, compiler, truth, seed):
    check_random_run(runners[1], compiler, truth, seed)


def test_drafts_are_those_of_a_head_without_a_paged_cache(
    runners, model, head, compiler, monkeypatch
):
    """With prompts of two steps, prefix hits, accepted and rejected drafts."""
    stepper = HeadStepper(model, head, max_tokens=MAX_MODEL_LEN)
    take_drafts, drawn, found = DeviceStep._take_drafts, defaultdict(list), []

    def take(step, sampled_token_ids):
        drafts = take_drafts(step, sampled_token_ids)
        for req_id, token_ids in zip(step._built.req_ids, sampled_token_ids, strict=True):
            drawn[req_id] += token_ids
            if token_ids:
                found.append((req_id, list(drawn[req_id]), drafts[req_id]))
        return drafts

    monkeypatch.setattr(DeviceStep, "_take_drafts", take)
    prompt_ids = prompt(20, 3)
    requests = [
        make_request("whole", 20, ignore_eos=True),
        dataclasses.replace(make_request("hit", 20, ignore_eos=True), prompt_token_ids=prompt_ids),
        dataclasses.replace(
            make_request("late", 20, ignore_eos=True, temperature=0.7, seed=1),
            prompt_token_ids=[*prompt_ids[:17], 9, 8, 7],
        ),
    ]
    run_with_drafts(runners[1], requests, compiler, caching=True, arrivals=[6, 12])
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    num_right = num_drafts = 0
    for req_id, token_ids, draft_ids in found:
        known = [*prompts[req_id], *token_ids]
        if len(known) + MAX_DRAFTS <= MAX_MODEL_LEN:
            assert draft_ids == stepper.drafts(known, MAX_DRAFTS, MAX_MODEL_LEN)
            following = drawn[req_id][len(token_ids) :]
            num_drafts += len(following[:1])
            num_right += following[:1] == draft_ids[:1]
    assert 0.2 * num_drafts < num_right < num_drafts


@pytest.mark.slow
def test_drafts_change_no_answer_in_300_runs(runners, compiler, truth):
    for seed in range(1000, 1300):
        check_random_run(runners[1], compiler, truth, seed)
