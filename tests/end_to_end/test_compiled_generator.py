"""The compiled generation draws the engine's tokens, whatever a request's settings are."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import monitoring

import models.demo
from models import load_model
from paxkv import LLM, CompiledGenerator, SamplingParams, StructuredOutputsParams
from paxkv.config.sampling_params import NO_SEED
from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.generate import GenerateShape

CHECKPOINT = Path(models.demo.__file__).parent / "checkpoint"
EOS_TOKEN_IDS = (2, 0)  # of its generation_config.json
SHAPE = GenerateShape(batch_size=3, max_prompt_len=16, max_new_tokens=12)
TEXTS = ["2 + 2 =", "What is a block?", "Say hello."]
GREEDY = {"temperature": 0.0, "max_tokens": 10}
DRAWN = {"temperature": 1.5, "max_tokens": 10, "seed": 3}
# Settings without and with each field; the answers to TEXTS[0] are different ones.
FELT = {
    "temperature": (GREEDY, DRAWN),
    "top_p": (DRAWN, DRAWN | {"top_p": 0.1}),
    "top_k": (DRAWN, DRAWN | {"top_k": 1}),
    "min_p": (DRAWN, DRAWN | {"min_p": 0.9}),
    "seed": (DRAWN, DRAWN | {"seed": -(2**50)}),
    "max_tokens": (GREEDY, GREEDY | {"max_tokens": 1}),
    "min_tokens": (GREEDY, GREEDY | {"min_tokens": 8}),
    "stop_token_ids": (GREEDY, GREEDY | {"stop_token_ids": [223]}),
    "ignore_eos": (GREEDY, GREEDY | {"ignore_eos": True}),
    "presence_penalty": (GREEDY, GREEDY | {"presence_penalty": 2.0}),
    "frequency_penalty": (GREEDY, GREEDY | {"frequency_penalty": -2.0, "min_tokens": 8}),
    "repetition_penalty": (GREEDY, GREEDY | {"repetition_penalty": 5.0}),
    "bad_words": (GREEDY, GREEDY | {"bad_words": ["4"]}),
    "allowed_token_ids": (GREEDY, GREEDY | {"allowed_token_ids": [20, 21]}),
    "logit_bias": (GREEDY, GREEDY | {"logit_bias": {22: -100.0}}),
}
REFUSED = {
    "n": 2,
    "stop": ["4"],
    "logprobs": 1,
    "prompt_logprobs": 1,
    "structured_outputs": StructuredOutputsParams(regex="a"),
}
UNFELT = {
    "include_stop_str_in_output": True,
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "skip_reading_prefix_cache": True,
}


@pytest.fixture(scope="module")
def llm(demo_llm: LLM) -> LLM:
    return demo_llm


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.get_tokenizer().encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def generator(llm: LLM) -> CompiledGenerator:
    return CompiledGenerator(
        load_model(CHECKPOINT), SHAPE, max_model_len=64, tokenizer=llm.get_tokenizer()
    )


def engine_tokens(llm: LLM, prompts, params) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def generated_tokens(generator: CompiledGenerator, prompts, params) -> list[list[int]]:
    return generator.generate(prompts, params, eos_token_ids=EOS_TOKEN_IDS)


def test_every_field_is_felt_or_refused_or_about_text() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert sorted([*FELT, *REFUSED, *UNFELT]) == sorted(fields)


@pytest.mark.parametrize("name", FELT)
def test_field_of_one_row_does_what_it_does_in_the_engine(llm, prompts, generator, name) -> None:
    without, with_field = (SamplingParams(**fields) for fields in FELT[name])
    params = [without, with_field, without]
    same_prompts = [prompts[0]] * 3
    tokens = generated_tokens(generator, same_prompts, params)
    assert tokens == engine_tokens(llm, same_prompts, params)
    assert tokens[0] == tokens[2] != tokens[1]


def test_fields_about_text_change_nothing(prompts, generator) -> None:
    plain, other = (SamplingParams(**GREEDY, **fields) for fields in ({}, UNFELT))
    assert generator.generate(prompts, other) == generator.generate(prompts, plain)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_engine_is_refused(prompts, generator, name) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"{name}=.*LLM") as refused:
        generator.generate(prompts, SamplingParams(max_tokens=2, **{name: REFUSED[name]}))
    assert refused.value.param == name


def params_of_one() -> st.SearchStrategy[SamplingParams]:
    """Any combination of the fields, each more often left out than not."""
    token_ids = st.integers(0, 767)
    values = {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "top_k": st.sampled_from([-1, 2, 40]),
        "min_p": st.sampled_from([0.1, 0.5]),
        "stop_token_ids": st.lists(token_ids, max_size=3),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.sampled_from([0.5, 1.2, 9.0]),
        "bad_words": st.lists(
            st.sampled_from(["4", "a", "block", "the end", "hello"]), min_size=1, max_size=3
        ),
        "allowed_token_ids": st.lists(token_ids, min_size=3, max_size=99, unique=True),
        "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100), max_size=99),
        "min_tokens": st.integers(0, 8),
    }
    return st.builds(
        lambda seed, max_tokens, fields: SamplingParams(seed=seed, max_tokens=max_tokens, **fields),
        # -1 is no seed: the engine then draws by the number of the request.
        st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != NO_SEED),
        st.integers(8, 12),
        st.lists(st.sampled_from(sorted(values)), max_size=5, unique=True).flatmap(
            lambda names: st.fixed_dictionaries({name: values[name] for name in names})
        ),
    )


THREE_ROWS = st.lists(params_of_one(), min_size=3, max_size=3)


@settings(max_examples=20)
@given(params=THREE_ROWS)
def test_any_rows_together_draw_the_engines_tokens(llm, prompts, generator, params) -> None:
    check_rows(llm, prompts, generator, params)


@pytest.mark.slow
@settings(max_examples=200)
@given(params=THREE_ROWS)
def test_many_rows_together_draw_the_engines_tokens(llm, prompts, generator, params) -> None:
    check_rows(llm, prompts, generator, params)


def check_rows(llm, prompts, generator, params) -> None:
    expected = engine_tokens(llm, prompts, params)
    assert generated_tokens(generator, prompts, params) == expected


def test_settings_that_may_leave_no_token_are_refused(prompts, generator) -> None:
    """Behind an "x" nothing would be allowed."""
    params = SamplingParams(**GREEDY, allowed_token_ids=[90], bad_words=["xx"])
    with pytest.raises(UnsupportedFeatureError, match="may leave no next token.*LLM"):
        generator.generate(prompts, params)


def test_two_programs_are_all_that_is_compiled(prompts, generator) -> None:
    events: list[str] = []

    def note(event: str, *_: object, **__: object) -> None:
        if "backend_compile" in event:
            events.append(event)

    monitoring.register_event_duration_secs_listener(note)
    try:
        for without, with_field in FELT.values():
            for fields in (without, with_field):
                generator.generate(prompts, SamplingParams(**fields))
    finally:
        monitoring.unregister_event_duration_listener(note)
    # Earlier tests may have compiled one of them, or both.
    assert len(events) <= generator._generate._cache_size() == 2


def test_bad_words_need_a_tokenizer(prompts) -> None:
    generator = CompiledGenerator(load_model(CHECKPOINT), SHAPE)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        generator.generate(prompts, SamplingParams(max_tokens=2, bad_words=["4"]))


def test_eos_token_of_the_tokenizer_ends_a_row(prompts, generator) -> None:
    with_eos, without = (SamplingParams(**GREEDY, ignore_eos=ignore) for ignore in (False, True))
    tokens = generator.generate([prompts[0]] * 2, [with_eos, without])
    assert tokens[0][-1] == 2
    assert len(tokens[0]) < len(tokens[1]) == 10
