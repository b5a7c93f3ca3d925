"""Draft models with states in engines: no answer changes, and states forget rejected drafts."""

import dataclasses
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import LoadedModel, load_model
from models.loading.loaded_draft_model import LoadedDraftModel
from paxkv.config.cache_config import CacheConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.runner import ModelRunner
from tests.end_to_end.engine_runs import run
from tests.end_to_end.parity import make_checkpoint
from tests.end_to_end.test_state_drafts import (
    MAX_TOKENS,
    make_requests,
    num_tiny_blocks,
    propose_by,
)
from tests.end_to_end.test_state_generator_drafts import NUM_DRAFTS, add_noise, count_steps_of
from tests.paxkv.runner.shared_runners import make_runner

if TYPE_CHECKING:
    import torch


def make_model(family: str, folder: Path, *, seed: int) -> tuple["torch.nn.Module", LoadedModel]:
    theirs = make_checkpoint(family, folder, seed, is_shallow=True, is_sharp=True)
    return theirs, load_model(folder, dtype="float32")


def make_drafting_runner(
    model: LoadedModel,
    draft_model: LoadedModel,
    *,
    in_bursts: bool,
    batch_invariant: bool = False,
) -> ModelRunner:
    speculative = SpeculativeConfig(
        method="draft_model",
        model="not read",
        num_speculative_tokens=NUM_DRAFTS,
        drafts_in_bursts=in_bursts,
        adapts_drafts=False,
    )
    return make_runner(
        model,
        # The cache is much larger than what programs need for anything else.
        CacheConfig(block_size=8, num_gpu_blocks_override=1000),
        runner_config=RunnerConfig(speculative_config=speculative, batch_invariant=batch_invariant),
        head=LoadedDraftModel.of_model(draft_model, model),
    )


def greedy(request: EngineRequest) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return dataclasses.replace(request, sampling_params=params)


@pytest.mark.parametrize(
    ("family", "in_bursts"),
    [
        ("mamba2", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("mamba2", True), ("qwen3.5", False), ("qwen3.5", True))
        ),
    ],
)
def test_drafts_are_those_of_transformers(
    family: str, in_bursts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A similar draft model is right as often as in transformers, and the model itself always.

    So no state lacks a token or has a rejected one, also after chunked prompts and prefix hits.
    No program copies the cache.
    """
    propose_by(None, monkeypatch)
    theirs, model = make_model(family, tmp_path / "target", seed=1)
    add_noise(tmp_path / "target", tmp_path / "similar")
    similar = load_model(tmp_path / "similar", dtype="float32")
    theirs = type(theirs).from_pretrained(tmp_path / "similar", dtype="float32")
    requests = [greedy(request) for request in make_requests()[:5]]
    plain = make_runner(model)
    truth = {
        request.request_id: run(plain, [request])[0][request.request_id] for request in requests
    }
    runner = make_drafting_runner(model, similar, in_bursts=in_bursts)
    settings = {"max_drafts": NUM_DRAFTS, "is_async": in_bursts}
    settings["max_decode_burst"] = 8 if in_bursts else 1
    num_accepted = 0
    for request in requests:
        wanted = truth[request.request_id].token_ids
        answer = run(runner, [request], **settings)[0][request.request_id]
        assert answer.token_ids == wanted
        num_accepted += answer.num_accepted_tokens
        # In bursts, the number is smaller: a burst verifies no drafts past its end.
        if not in_bursts:
            num_steps = count_steps_of(theirs, request.prompt_token_ids, wanted)
            assert answer.num_accepted_tokens == MAX_TOKENS - 1 - num_steps
    assert len(requests) < num_accepted < len(requests) * MAX_TOKENS / 2
    for params in (similar.params, model.params):
        runner.worker.head_params = params
        answers, _ = run(runner, requests, caching=True, arrivals=[0, 9, 9, 30], **settings)
        for req_id, answer in answers.items():
            assert answer.token_ids == truth[req_id].token_ids
            if params is model.params:
                assert answer.num_accepted_tokens == answer.num_draft_tokens > 5
    cache_bytes = runner.worker.kv_cache.nbytes
    for shape, program in runner.worker.programs._programs.items():
        assert program.memory_analysis().temp_size_in_bytes < cache_bytes / 2, shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "draft_family"),
    [("llama", "mamba2"), ("qwen3.5", "bamba"), ("mamba2", "mamba"), ("bamba", "mamba2")],
)
@pytest.mark.parametrize("in_bursts", [False, True])
def test_drafts_of_other_families_change_no_answer(
    family: str,
    draft_family: str,
    in_bursts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    propose_by(None, monkeypatch)
    _, model = make_model(family, tmp_path / "target", seed=1)
    _, draft_model = make_model(draft_family, tmp_path / "draft", seed=2)
    runner = make_drafting_runner(model, draft_model, in_bursts=in_bursts)
    plain, requests = make_runner(model), make_requests()[:5]
    answers, _ = run(
        runner,
        requests,
        max_drafts=NUM_DRAFTS,
        max_decode_burst=8 if in_bursts else 1,
        is_async=in_bursts,
        caching=True,
        arrivals=[0, 3, 9],
    )
    for request in requests:
        wanted = run(plain, [request])[0][request.request_id]
        assert answers[request.request_id].token_ids == wanted.token_ids
    assert sum(answer.num_draft_tokens for answer in answers.values()) > len(requests)


@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", ["qwen3.5", "bamba"])
def test_drafts_change_no_answer_of_preempted_requests(
    family: str, batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs in tiny pools, with prefix hits, forks and an abort.

    With batch invariance, log-probabilities equal those of a request that runs alone, bit by bit.
    """
    propose_by(None, monkeypatch)
    _, model = make_model(family, tmp_path / "target", seed=1)
    add_noise(tmp_path / "target", tmp_path / "similar")
    draft_model = load_model(tmp_path / "similar", dtype="float32")
    runner = make_drafting_runner(
        model, draft_model, in_bursts=False, batch_invariant=batch_invariant
    )
    alone = runner if batch_invariant else make_runner(model)
    requests = make_requests()
    truth = {
        request.request_id: run(alone, [request], max_drafts=NUM_DRAFTS * batch_invariant)[0][
            request.request_id
        ]
        for request in requests
    }
    num_preempted = num_accepted = 0
    for seed in range(4):
        rng = random.Random(seed)
        aborted = str(rng.randrange(5))
        answers, num_preemptions = run(
            runner,
            requests,
            max_drafts=NUM_DRAFTS,
            is_async=rng.random() < 0.5,
            num_blocks=num_tiny_blocks(runner) if seed % 2 else None,
            caching=rng.random() < 0.7,
            arrivals=sorted(rng.choices(range(20), k=len(requests) - 2)),
            aborts=[(rng.randrange(30), aborted)],
        )
        for req_id, answer in answers.items():
            num_wanted = len(answer.token_ids) if req_id == aborted else None
            assert answer.token_ids == truth[req_id].token_ids[:num_wanted], (seed, req_id)
            if batch_invariant:
                assert answer.logprobs == truth[req_id].logprobs[:num_wanted], (seed, req_id)
        num_preempted += num_preemptions
        num_accepted += sum(answer.num_accepted_tokens for answer in answers.values())
    assert num_preempted > 0
    assert num_accepted > 0
