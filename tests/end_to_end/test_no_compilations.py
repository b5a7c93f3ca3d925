"""Once the engine is ready nothing compiles any more, whatever is asked of it."""

import random

import jax
import jax.monitoring

from paxkv import LLM, SamplingParams

NUM_REQUESTS = 2_000
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
    shared = [7] * draw.choice([0, 0, 0, 32])
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


def test_nothing_compiles_over_2000_random_requests():
    draw = random.Random(0)
    prompts, params = zip(*(random_request(draw) for _ in range(NUM_REQUESTS)), strict=True)
    events = []
    # A pool so small that requests are preempted, too.
    settings = {
        "num_gpu_blocks_override": 50,
        "block_size": 16,
        "full_sequence_must_fit": False,
    }
    with LLM(**settings, max_num_batched_tokens=256) as llm:
        ready_stats = llm.get_stats()
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: events.append(event) if "compile" in event else None
        )
        try:
            outputs = []
            # Now and then few run, and now and then one.
            for start, end in ((0, 1_500), (1_500, 1_510), (1_510, 1_511), (1_511, NUM_REQUESTS)):
                outputs += llm.generate(prompts[start:end], params[start:end], use_tqdm=False)
        finally:
            jax.monitoring.clear_event_listeners()
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
