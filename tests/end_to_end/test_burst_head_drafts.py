"""Answers do not change if a head or a draft model proposes drafts inside bursts."""

import dataclasses
import random
from collections import defaultdict

import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.runner.batch.device_step import DeviceStep
from paxkv.runner.features import feature_list
from tests.end_to_end.engine_runs import run
from tests.end_to_end.test_burst_drafts import RandomBurstPacer
from tests.end_to_end.test_drafts import check_equal, make_request
from tests.end_to_end.test_drafts import compiler as compiler
from tests.end_to_end.test_head_drafts import (
    ALL_REQUESTS,
    MAX_DRAFTS,
    Drafting,
    Heads,
    ModelStepper,
    RandomPacer,
)
from tests.models.drafters.head_stepper import HeadStepper
from tests.paxkv.runner.features.test_prompt_logprobs import prompt
from tests.paxkv.runner.shared_runners import MAX_MODEL_LEN, make_warm_runner

MAX_DECODE_BURST = 8
# These requests need the host between their tokens, so the engine verifies their drafts in single
# steps.
IN_STEPS = [
    request
    for request in ALL_REQUESTS
    if request.needs_grammar or request.is_pooled or request.sampling_params.logprobs == -1
]
IN_BURSTS = [request for request in ALL_REQUESTS if request not in IN_STEPS]


@dataclasses.dataclass(frozen=True)
class BurstDrafting(Drafting):
    """Attributes: burst_pacer: Chooses bursts at random. None: all bursts verify drafts."""

    burst_pacer: RandomBurstPacer | None


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return Heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def plain_runners():
    """Runners without drafts, which several heads share."""
    return {}


@pytest.fixture(
    scope="module",
    params=[
        ("eagle3", True),
        # `test_generation_drafts.py` runs the loop with a draft model.
        pytest.param(("draft_model", False), marks=pytest.mark.slow),
        pytest.param(("eagle3", False), marks=pytest.mark.slow),
        pytest.param(("draft_model", True), marks=pytest.mark.slow),
        # A program with experts takes several times as long to compile.
        pytest.param(("mtp", False), marks=pytest.mark.slow),
        pytest.param(("mtp", True), marks=pytest.mark.slow),
    ],
    ids=lambda param: f"{param[0]}_{'adapting' if param[1] else 'always'}",
)
def drafting(request, heads, plain_runners):
    method, adapts = request.param
    model, head = getattr(heads, method)
    speculative = SpeculativeConfig(
        method=method,
        num_speculative_tokens=MAX_DRAFTS,
        model=None if method == "mtp" else "not read",
        adapts_drafts=adapts,
        drafts_in_bursts=True,
    )
    config = RunnerConfig(max_logprobs=-1)

    if model.config.architecture not in plain_runners:
        plain = make_warm_runner(model, config, has_few_sizes=True).runner
        plain_runners[model.config.architecture] = plain
    pacer = RandomPacer(MAX_DRAFTS) if adapts else None
    burst_pacer = RandomBurstPacer() if adapts else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_list, "DepthPacer", lambda max_drafts, clock: pacer)
        patch.setattr(feature_list, "BurstDraftPacer", lambda clock: burst_pacer)
        config = dataclasses.replace(config, speculative_config=speculative)
        # Slow tests and `test_burst_drafts` have a program of bursts for a single request too.
        has_few_sizes = (method, adapts) == ("eagle3", True)
        runner = make_warm_runner(model, config, head=head, has_few_sizes=has_few_sizes).runner
    if method == "draft_model":
        stepper = ModelStepper(head)
    else:
        stepper = HeadStepper(model, head, max_tokens=MAX_MODEL_LEN, width=MAX_MODEL_LEN)
    plain = plain_runners[model.config.architecture]
    return BurstDrafting(method, False, pacer, plain, runner, stepper, burst_pacer)


@pytest.fixture(scope="module")
def truth(drafting, compiler):
    """The answer of each request alone, in an engine without drafts."""
    return {
        request.request_id: run(drafting.plain, [request], compiler=compiler)[0][request.request_id]
        for request in ALL_REQUESTS
    }


def run_with_drafts(drafting, requests, compiler, **settings):
    # As in a new runner: the head computes prompts until a burst has no drafts.
    drafting.runner._head_drafts._was_drafting = True
    return run(
        drafting.runner,
        requests,
        compiler=compiler,
        max_drafts=MAX_DRAFTS,
        use_eagle=drafting.method != "draft_model",
        **settings,
    )


def check_random_run(drafting, compiler, truth, seed):
    """Returns the number of drafts that were verified.

    The run may have prefix hits, few blocks, chunked prompts, arrivals, async scheduling, bursts
    with and without drafts, and requests that cannot be in bursts.
    """
    rng = random.Random(seed)
    if drafting.pacer is not None:
        drafting.pacer.rng = drafting.burst_pacer.rng = rng
        drafting.burst_pacer.share = rng.choice((1.0, 0.5))
    few_blocks = 1 + 7 * len(drafting.runner.kv_cache_config.kv_cache_groups)
    pool = rng.choice((IN_BURSTS, IN_BURSTS, ALL_REQUESTS))
    requests = rng.sample(pool, rng.randint(1, len(pool)))
    num_arrivals = rng.randint(0, len(requests) - 1)
    answers, _ = run_with_drafts(
        drafting,
        requests,
        compiler,
        is_async=rng.random() < 0.7,
        num_blocks=rng.choice([None, few_blocks]),
        caching=rng.random() < 0.5,
        max_decode_burst=rng.choice([3, MAX_DECODE_BURST]),
        arrivals=sorted(rng.choices(range(15), k=num_arrivals)),
    )
    for req_id, answer in answers.items():
        check_equal(answer, truth[req_id])
        assert answer.num_accepted_tokens <= answer.num_draft_tokens
    assert drafting.runner.num_compiles_after_ready == 0
    return sum(answer.num_draft_tokens for answer in answers.values())


@pytest.mark.parametrize("seed", range(1, 7))
def test_drafts_in_bursts_change_no_answer(drafting, compiler, truth, seed):
    assert check_random_run(drafting, compiler, truth, seed) > 0


@pytest.mark.slow
def test_drafts_in_bursts_change_no_answer_in_300_runs(drafting, compiler, truth):
    num_drafts = [check_random_run(drafting, compiler, truth, seed) for seed in range(1000, 1300)]
    # Random pacers may decide against drafts in each step and burst of a short run.
    assert sum(num > 0 for num in num_drafts) >= (200 if drafting.pacer else 300)


def expected_steps(drafting, known, drawn):
    """The drafts of each step of a burst that drew these tokens, and how many are right."""
    steps, num_drawn = [], 0
    while num_drawn < len(drawn):
        num_drafts = min(MAX_DRAFTS, len(drawn) - num_drawn - 1)
        num_right, following = 0, drawn[num_drawn:]
        if num_drafts:
            drafts = drafting.stepper.drafts([*known, *drawn[:num_drawn]], num_drafts)
            while num_right < num_drafts and drafts[num_right] == following[num_right]:
                num_right += 1
            steps.append((num_drafts, num_right))
        num_drawn += 1 + num_right
    return steps


@pytest.mark.parametrize("is_async", [False, True])
def test_drafts_are_those_of_a_drafter_without_a_paged_cache(
    drafting, compiler, monkeypatch, is_async
):
    """With prompts of two steps, prefix hits, arrivals, and rows that end within a burst."""
    if drafting.pacer is not None:
        monkeypatch.setattr(drafting.burst_pacer, "share", 1.0)
    read, drawn, found = DeviceStep._read_burst_drafts, defaultdict(list), []

    def read_drafts(step, result_np, sampled_token_ids):
        burst_drafts = read(step, result_np, sampled_token_ids)
        for req_id, token_ids in zip(step._built.req_ids, sampled_token_ids, strict=True):
            if getattr(step._built.shape, "drafts", None) is not None:
                found.append((req_id, len(drawn[req_id]), token_ids, burst_drafts.get(req_id, [])))
            drawn[req_id] += token_ids
        return burst_drafts

    monkeypatch.setattr(DeviceStep, "_read_burst_drafts", read_drafts)
    prompt_ids = prompt(3, 20)
    requests = [
        make_request("whole", 20, ignore_eos=True),
        dataclasses.replace(
            make_request("hit", 15, ignore_eos=True, max_tokens=15), prompt_token_ids=prompt_ids
        ),
        dataclasses.replace(
            make_request("late", 20, ignore_eos=True, temperature=0.7, seed=1),
            prompt_token_ids=[*prompt_ids[:16], 9, 8, 7, 6],
        ),
    ]
    settings = {"caching": True, "max_decode_burst": MAX_DECODE_BURST, "is_async": is_async}
    run_with_drafts(drafting, requests, compiler, arrivals=[6, 9], **settings)
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    num_right = num_drafts = 0
    for req_id, num_before, token_ids, steps in found:
        known = [*prompts[req_id], *drawn[req_id][:num_before]]
        assert steps == expected_steps(drafting, known, token_ids)
        num_drafts += sum(count for count, _ in steps)
        num_right += sum(right for _, right in steps)
    assert num_drafts > 10
    if drafting.method != "eagle3":
        assert 0.1 * num_drafts < num_right < num_drafts


def test_a_request_with_a_grammar_has_drafts_in_steps(drafting, compiler, truth, monkeypatch):
    if drafting.pacer is not None:
        monkeypatch.setattr(drafting.pacer, "choose", lambda num_reqs, chances: MAX_DRAFTS)
        monkeypatch.setattr(RandomPacer, "num_drafts", MAX_DRAFTS)
    request = next(request for request in IN_STEPS if request.needs_grammar)
    answers, _ = run_with_drafts(
        drafting, [request], compiler, is_async=True, max_decode_burst=MAX_DECODE_BURST
    )
    check_equal(answers[request.request_id], truth[request.request_id])
    assert answers[request.request_id].num_draft_tokens > 0
