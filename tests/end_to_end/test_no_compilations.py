"""Once the engine is ready nothing compiles any more, whatever is asked of it."""

import dataclasses
import random

import jax
import jax.monitoring
import pytest

from paxkv import LLM, SamplingParams
from paxkv.entrypoints import build
from tests.demo_programs import SETTINGS, demo_programs
from tests.engine_compilations import process_engine_compilations

NUM_BLOCKS = 9
VOCAB_SIZE = 500


def random_changes(draw: random.Random) -> dict[str, object]:
    """Fields that change logits before a draw, and one that needs a step of its own."""
    return {
        "presence_penalty": draw.choice([0.0, 0.5]),
        "repetition_penalty": draw.choice([1.0, 1.2]),
        "logit_bias": draw.choice([None, {7: 5.0}]),
        "allowed_token_ids": draw.choice([None, list(range(400))]),
        "bad_words": draw.choice([None, ["a", "the end"]]),
        "min_tokens": draw.choice([0, 1]),
        "prompt_logprobs": draw.choice([None, 3]),
    }


def random_request(draw: random.Random) -> tuple[list[int], SamplingParams]:
    length = draw.randint(100, 300) if draw.random() < 0.02 else draw.randint(1, 16)
    # Whole blocks of it are found again, and many requests need another block while they decode.
    shared = [7] * draw.choice([0, 0, 0, 120])
    temperature = draw.choice([0.0, 0.7, 1.5])
    params = SamplingParams(
        max_tokens=draw.randint(1, 14),
        temperature=temperature,
        n=draw.choice([1, 1, 1, 3]) if temperature > 0 else 1,
        top_k=draw.choice([0, 0, 5, 40]),
        top_p=draw.choice([1.0, 0.9]),
        min_p=draw.choice([0.0, 0.1]),
        seed=draw.choice([None, 3]),
        logprobs=draw.choice([None, None, 0, 5, 20]),
        ignore_eos=draw.random() < 0.5,
        stop_token_ids=draw.choice([None, [5, 6]]),
        # Few, so that the others decode in bursts now and then.
        **(random_changes(draw) if draw.random() < 0.05 else {}),
    )
    return shared + [draw.randrange(VOCAB_SIZE) for _ in range(length)], params


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch):
    """Its scheduler has so few of the device's blocks that requests are preempted, too."""
    make_scheduler = build._make_scheduler

    def make_small_scheduler(header, *others):
        small = dataclasses.replace(header.kv_cache_config, num_blocks=NUM_BLOCKS)
        return make_scheduler(dataclasses.replace(header, kv_cache_config=small), *others)

    monkeypatch.setattr(build, "_make_scheduler", make_small_scheduler)
    with process_engine_compilations():
        llm = LLM(compiled_dir=str(demo_programs()), full_sequence_must_fit=False, **SETTINGS)
    with llm:
        yield llm


@pytest.mark.parametrize("num_requests", [150, pytest.param(2_000, marks=pytest.mark.slow)])
def test_nothing_compiles_over_many_random_requests(llm: LLM, num_requests: int):
    draw = random.Random(0)
    prompts, params = zip(*(random_request(draw) for _ in range(num_requests)), strict=True)
    events = []
    ready_stats = llm.get_stats()

    def listen(event, *_, **__):
        if "compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        outputs = []
        # Now and then few run, and now and then one.
        for start, end in ((0, 110), (110, 120), (120, 121), (121, num_requests)):
            outputs += llm.generate(prompts[start:end], params[start:end], use_tqdm=False)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    stats = llm.get_stats()
    assert all(completion.token_ids for output in outputs for completion in output.outputs)
    assert events == []
    assert stats.num_compiles_after_ready == ready_stats.num_compiles_after_ready == 0
    assert stats.num_preemptions > 0
    print(
        f"{stats.num_steps} steps, {stats.num_scheduled_tokens} tokens, "
        f"{stats.num_preemptions} preemptions, padding {stats.padding_waste_ratio:.1%}"
    )
    # Most prompts here are far below the smallest bucket.
    assert 0 < stats.padding_waste_ratio < 0.4
