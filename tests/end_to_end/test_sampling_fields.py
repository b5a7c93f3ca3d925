"""Penalties, biases and bad words give the same tokens however the engine gets there."""

import dataclasses

import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from tests.end_to_end.engine_harness import EngineSettings, run_engine
from tests.oracles.serving_golden import write_serving_recipe

BLOCK_SIZE, NUM_NEW_TOKENS, VOCAB_SIZE = 8, 14, 160
ROOMY = EngineSettings(block_size=BLOCK_SIZE, num_blocks=200)
SETTINGS = {
    "all_at_once": ROOMY,
    "no_prefix_cache": dataclasses.replace(ROOMY, enable_prefix_caching=False),
    "arriving_while_others_run": dataclasses.replace(ROOMY, arrival_gap=2),
    "prompts_in_pieces": dataclasses.replace(ROOMY, max_num_batched_tokens=11),
    "preempted": dataclasses.replace(ROOMY, num_blocks=22, enable_prefix_caching=False),
    "a_step_ahead": dataclasses.replace(ROOMY, max_steps_in_flight=2, max_decode_burst=5),
    "a_step_ahead_preempted": dataclasses.replace(
        ROOMY, max_steps_in_flight=2, max_num_batched_tokens=40, num_blocks=17
    ),
}
SHARED = np.random.default_rng(0).integers(1, VOCAB_SIZE, 40).tolist()
PROMPTS = [[*SHARED, 7], [*SHARED, 8, 9], [11, 12], [5] * 20, [21, 22, 23], SHARED[:30]]
# The first is plain, and may decode in bursts again when the others have ended.
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS + 6, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS),
    SamplingParams(
        temperature=0.9,
        seed=3,
        max_tokens=NUM_NEW_TOKENS,
        presence_penalty=0.8,
        frequency_penalty=0.6,
        logit_bias={5: 2.0, 17: -100},
        top_p=0.9,
    ),
    SamplingParams(
        temperature=1.2,
        max_tokens=NUM_NEW_TOKENS,
        allowed_token_ids=list(range(0, VOCAB_SIZE, 3)),
        min_tokens=6,
        stop_token_ids=list(range(0, VOCAB_SIZE, 6)),
    ),
    SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, presence_penalty=-1.0),
]


@pytest.fixture(scope="module")
def runner(llama_runner):
    return llama_runner


@pytest.fixture(scope="module")
def bad_words(runner):
    """Of prompt 2: its most likely first token, and the second with the one after it."""
    plain = run_engine(runner, [PROMPTS[2]], ROOMY, sampling_params=[PARAMS[2]]).token_ids[0]
    assert plain[0] not in plain[1:3]
    return {2: ((plain[0],), tuple(plain[1:3]), (plain[2], plain[3]))}


@pytest.fixture(scope="module")
def alone(runner, bad_words):
    return [
        run_engine(
            runner,
            [prompt],
            ROOMY,
            sampling_params=[params],
            bad_words_token_ids={0: bad_words.get(i, ())},
        ).token_ids[0]
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]


@pytest.fixture(scope="module")
def at_once(runner, bad_words):
    """Of all requests together."""
    return run_engine(
        runner, PROMPTS, ROOMY, sampling_params=PARAMS, bad_words_token_ids=bad_words
    ).token_ids


@pytest.mark.parametrize("name", SETTINGS)
def test_answer_does_not_depend_on_settings(runner, bad_words, alone, at_once, name):
    # A request without a seed draws by its id, which is its place.
    is_seeded = [params.temperature == 0 or params.seed is not None for params in PARAMS]
    result = run_engine(
        runner, PROMPTS, SETTINGS[name], sampling_params=PARAMS, bad_words_token_ids=bad_words
    )
    for tokens, expected, is_same in zip(result.token_ids, alone, is_seeded, strict=True):
        assert tokens == expected or not is_same
    assert (result.num_preemptions > 0) == ("preempted" in name)
    assert result.token_ids == at_once


@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_ends_where_no_token_is_left(runner, name):
    """Of two allowed tokens neither may follow the other twice, nor itself."""
    words = ((7, 7), (9, 9), (7, 9, 7), (9, 7, 9))
    params = [
        PARAMS[0],
        *(
            SamplingParams(
                temperature=temperature,
                seed=1,
                max_tokens=NUM_NEW_TOKENS,
                allowed_token_ids=[7, 9],
                logprobs=1,
            )
            for temperature in (0.0, 1.0)
        ),
    ]
    result = run_engine(
        runner,
        PROMPTS[:3],
        SETTINGS[name],
        sampling_params=params,
        bad_words_token_ids={1: words, 2: words},
        scarce_token_ids={1: (7, 9), 2: (7, 9)},
    )
    assert len(result.token_ids[0]) == params[0].max_tokens
    for tokens in result.token_ids[1:]:
        assert tokens in ([7, 9], [9, 7])


def test_fields_hold_in_the_answer(runner, bad_words, alone):
    tokens = alone[2]
    (first,), pair, _ = bad_words[2]
    assert first not in tokens
    assert pair not in zip(tokens[:-1], tokens[1:], strict=True)
    assert 17 not in alone[3]
    allowed = alone[4]
    assert set(allowed) <= set(range(0, VOCAB_SIZE, 3))
    # Half of what is allowed ends it, but not among the first six.
    assert 6 < len(allowed) <= NUM_NEW_TOKENS
    assert not set(allowed[:6]) & set(range(0, VOCAB_SIZE, 6))


def test_greedy_answers_equal_transformers(tmp_path, runner):
    """With its own processors: repetition penalty, bad words, and no end before min_tokens."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint = write_serving_recipe(tmp_path, "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def generate(prompt, **settings):
        input_ids = torch.tensor([prompt])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            pad_token_id=0,
            **settings,
        )
        return output[0, len(prompt) :].tolist()

    def ours(prompt, words=(), **fields):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, **fields)
        return run_engine(
            runner, [prompt], ROOMY, sampling_params=[params], bad_words_token_ids={0: words}
        ).token_ids[0]

    for prompt in (PROMPTS[0], PROMPTS[2]):
        plain = generate(prompt, eos_token_id=None)
        penalised = generate(prompt, eos_token_id=None, repetition_penalty=1.4)
        assert ours(prompt, repetition_penalty=1.4) == penalised
        words = ((plain[0],), (plain[1], plain[2]))
        banned = generate(prompt, eos_token_id=None, bad_words_ids=[list(word) for word in words])
        assert ours(prompt, words) == banned != plain
        end = plain[2]
        late = generate(prompt, eos_token_id=end, min_new_tokens=6)
        assert ours(prompt, stop_token_ids=[end], min_tokens=6) == late != plain[:3]
