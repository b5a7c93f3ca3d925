"""The input processor rejects every invalid request with an error that says what to do."""

import dataclasses

import pytest
from tokenizers import models

from paxkv.client.input_processor import InputProcessor, text_of_prompt
from paxkv.client.parallel_sampling import make_children
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts import wire
from paxkv.contracts.engine_request import AddRequest
from paxkv.errors import (
    InvalidRequestError,
    NeverFitsError,
    PromptTooLongError,
    UnsupportedFeatureError,
)
from paxkv.text.tokenizer import Tokenizer
from tests.paxkv.text.small_tokenizers import BOS, EOS, byte_level_backend, byte_level_tokenizer

BOS_ID, EOS_ID = 256, 257


def make(**changes: object) -> InputProcessor:
    arguments = {
        "tokenizer": byte_level_tokenizer(),
        "vocab_size": 300,
        "max_model_len": 100,
        "max_fitting_tokens": 1000,
    }
    return InputProcessor(**{**arguments, **changes})


def process(processor: InputProcessor, prompt: object, **params: object) -> object:
    return processor.process(prompt, SamplingParams(**params), request_id="r")


@pytest.mark.parametrize(
    "prompt", ["ab", [97, 98], (97, 98), {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}]
)
def test_every_form_of_a_prompt_becomes_the_same_token_ids(prompt: object) -> None:
    request = process(make(), prompt)
    assert request.prompt_token_ids == [97, 98]
    assert request.request_id == "r"
    assert request.arrival_time > 1.7e9
    wire.encode(AddRequest(request=request))


def test_seed_minus_one_means_no_seed_only_for_the_request() -> None:
    assert process(make(), [97], seed=-1).sampling_params.seed is None
    request = process(make(), [97, 98], seed=-2, n=2)
    assert [child.sampling_params.seed for child in make_children(request)] == [-2, -1]


def test_bos_is_added_to_text_by_default() -> None:
    config = {"bos_token": BOS, "add_bos_token": True}
    processor = make(tokenizer=Tokenizer(byte_level_backend(), config))
    assert process(processor, "a").prompt_token_ids == [BOS_ID, 97]
    prompt = {"prompt": "a", "add_special_tokens": False}
    assert process(processor, prompt).prompt_token_ids == [97]
    assert process(processor, [97]).prompt_token_ids == [97]


@pytest.mark.parametrize(
    ("num_chars", "options", "num_tokens"),
    [
        (0, {}, 0),
        # The last of these characters is in the prompt's token "cd".
        (3, {}, 2),
        (4, {}, 3),
        (3, {"truncate_prompt_tokens": 1, "truncation_side": "right"}, 1),
        (3, {"truncate_prompt_tokens": 2}, 0),
        (3, {"truncate_prompt_tokens": 3}, 2),
    ],
)
def test_tokens_of_leading_messages_are_counted(num_chars, options, num_tokens) -> None:
    backend = byte_level_backend([b"cd"])
    vocab = backend.get_vocab(with_added_tokens=False)
    backend.model = models.BPE(vocab=vocab, merges=[("c", "d")])
    processor = make(tokenizer=Tokenizer(backend, {}))
    prompt = {"prompt": "abcd", "num_leading_chars": num_chars, **options}
    assert process(processor, "abcd").num_leading_tokens == 0
    assert process(processor, prompt).num_leading_tokens == num_tokens


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "ab", "num_leading_chars": 3},
        {"prompt": "ab", "num_leading_chars": -1},
        {"prompt": "ab", "num_leading_chars": True},
        {"prompt_token_ids": [97], "num_leading_chars": 0},
    ],
)
def test_leading_part_that_is_not_in_the_text_is_rejected(prompt) -> None:
    with pytest.raises(InvalidRequestError, match="num_leading_chars"):
        process(make(), prompt)


def test_too_long_text_is_rejected_before_tokenization(monkeypatch) -> None:
    tokenizer = byte_level_tokenizer([b"12345678"])
    processor = make(tokenizer=tokenizer, max_model_len=10)
    num_encoded = 0

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        nonlocal num_encoded
        num_encoded += 1
        return [97] * -(-len(text) // 8)

    monkeypatch.setattr(tokenizer, "encode", encode)
    # A token has up to 8 characters, so that 9 tokens, the most that fit, have up to 72.
    assert len(process(processor, "x" * 72).prompt_token_ids) == 9
    for prompt in ("x" * 73, {"prompt": "x" * 73}):
        with pytest.raises(
            PromptTooLongError, match="at least 10 tokens > 9 max.* 73 char"
        ) as caught:
            process(processor, prompt)
        assert caught.value.param == "prompt" and num_encoded == 1
    # What is cut off need not fit; what came as ids is not text.
    cut = {"prompt": "x" * 800, "truncate_prompt_tokens": 3}
    assert process(processor, cut).prompt_token_ids == [97] * 3
    ids = {"prompt": "x" * 800, "prompt_token_ids": [97]}
    assert process(processor, ids).prompt_token_ids == [97]
    assert num_encoded == 2


def test_too_many_allowed_token_ids_are_rejected_unread() -> None:
    every = list(range(300))
    assert process(make(), [1], allowed_token_ids=every).sampling_params.allowed_token_ids == every
    # The last id is not in the model's vocabulary, but is not checked.
    with pytest.raises(InvalidRequestError, match="301 ids.* has 300") as caught:
        process(make(), [1], allowed_token_ids=[*every, 300])
    assert caught.value.param == "allowed_token_ids"


def test_token_ids_of_a_too_long_prompt_are_not_checked() -> None:
    # A request may contain millions of ids, and checking them would block the loop for a second.
    with pytest.raises(PromptTooLongError):
        process(make(), [-1] * 101)
    prompt = {"prompt_token_ids": [-1] * 200 + [97], "truncate_prompt_tokens": 1}
    assert process(make(), prompt).prompt_token_ids == [97]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        {"prompt_token_ids": []},
        {},
        {"prompt": 3},
        None,
        7,
        b"ab",
        [97, -1],
        [300],
        [97.0],
        [True],
        ["a"],
        [[97]],
        "\ud800",
        {"prompt": "a", "cache_salt": ""},
        {"prompt": "a", "cache_salt": 3},
        {"prompt": "a", "cache_salt": "\ud800"},
    ],
    ids=repr,
)
def test_values_that_are_not_prompts_are_rejected(prompt: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        process(make(), prompt)
    assert caught.value.param in ("prompt", "cache_salt")


@pytest.mark.parametrize(
    "key",
    [
        "multi_modal_data",
        "mm_features",
        "prompt_embeds",
        "lora_name",
        "lora_request",
        "needs_grammar",
        "fork_from",
        "keep_blocks",
    ],
)
def test_unknown_key_of_a_prompt_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=key):
        process(make(), {"prompt": "a", key: {}})


def test_internal_fields_of_the_request_keep_their_defaults() -> None:
    """Fields of `EngineRequest` that callers cannot set keep their defaults."""
    request = process(make(), {"prompt": "a", "cache_salt": "s"}, n=2)
    set_here = {
        "request_id",
        "prompt_token_ids",
        "sampling_params",
        "eos_token_ids",
        "arrival_time",
        "priority",
        "cache_salt",
    }
    for field in dataclasses.fields(request):
        if field.name not in set_here:
            assert getattr(request, field.name) == field.default, field.name


def test_token_id_beyond_the_models_vocabulary_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="98"):
        process(make(vocab_size=98), "ab")


def test_without_a_tokenizer_only_token_ids_are_accepted() -> None:
    processor = make(tokenizer=None)
    assert process(processor, [97]).prompt_token_ids == [97]
    with pytest.raises(InvalidRequestError, match="list of token ids") as raised:
        process(processor, "a")
    assert "[1, 2, 3]" in str(raised.value)
    # HTTP clients have no such key.
    assert "prompt_token_ids" not in str(raised.value)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        process(processor, [97], stop="x")


def test_prompt_must_leave_room_for_one_token() -> None:
    assert process(make(), [97] * 99).sampling_params.max_tokens == 1
    with pytest.raises(PromptTooLongError) as raised:
        process(make(), [97] * 100)
    # Clients of Anthropic's and of OpenAI's API search for these words.
    words = (
        "prompt is too long: 100 tokens > 99 maximum. This model's maximum context length is 100 "
    )
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(("asked", "expected"), [(5, 5), (50, 10), (None, 10)])
def test_max_tokens_is_cut_to_what_max_model_len_leaves(asked: int, expected: int) -> None:
    assert process(make(), [97] * 90, max_tokens=asked).sampling_params.max_tokens == expected


def test_request_larger_than_the_pool_is_refused() -> None:
    # 32 positions: a prompt of 20 and 13 tokens, the last of which is never stored.
    processor = make(max_fitting_tokens=32)
    assert process(processor, [97] * 20, max_tokens=13).sampling_params.max_tokens == 13
    words = (
        r"exceed context limit: 20 \+ 14 > 33\. .*maximum context length is 33 .*at most 13 tokens"
    )
    with pytest.raises(NeverFitsError, match=words):
        process(processor, [97] * 20, max_tokens=14)
    words = "prompt is too long: 33 tokens > 32 maximum.*maximum context length is 33 tokens here"
    with pytest.raises(PromptTooLongError, match=words):
        process(processor, [97] * 33, max_tokens=1)


def test_unset_max_tokens_is_what_the_pool_has_room_for() -> None:
    processor = make(max_fitting_tokens=32)
    assert process(processor, [97] * 20, max_tokens=None).sampling_params.max_tokens == 13
    assert process(processor, [97] * 32, max_tokens=None).sampling_params.max_tokens == 1


def test_unset_max_tokens_is_the_default_lowered_to_what_fits() -> None:
    processor = make(max_fitting_tokens=32, default_max_tokens=5)
    assert process(processor, [97] * 20, max_tokens=None).sampling_params.max_tokens == 5
    assert process(processor, [97] * 30, max_tokens=None).sampling_params.max_tokens == 3
    assert process(processor, [97] * 20, max_tokens=7).sampling_params.max_tokens == 7


def test_callers_max_tokens_can_be_treated_as_a_default() -> None:
    processor = make(max_fitting_tokens=32)
    for max_tokens, num_tokens in ((50, 13), (13, 13), (2, 2), (None, 13)):
        params = SamplingParams(max_tokens=max_tokens)
        request = processor.process([97] * 20, params, request_id="r", cuts_max_tokens=True)
        assert request.sampling_params.max_tokens == num_tokens


def test_prompt_must_fit_a_step_without_chunked_prefill() -> None:
    processor = make(max_prompt_tokens=64)
    assert len(process(processor, [97] * 64).prompt_token_ids) == 64
    with pytest.raises(InvalidRequestError, match="chunked prefill"):
        process(processor, [97] * 65)


def test_eos_ids_of_tokenizer_and_model_are_merged() -> None:
    processor = make(eos_token_ids=(7, EOS_ID, 8, 1000))
    # 1000 is no token of this model.
    assert process(processor, "a").eos_token_ids == (EOS_ID, 7, 8)
    assert EOS == byte_level_tokenizer().special_tokens["eos_token"]
    assert process(make(tokenizer=None, eos_token_ids=(7,)), [97]).eos_token_ids == (7,)


def test_other_parameters_are_unchanged() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"], stop_token_ids=[299], max_tokens=3)
    assert make().process("a", params, request_id="r").sampling_params == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 4


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_above_max_logprobs_are_rejected(field):
    for changes, most in (({}, 20), ({"max_logprobs": 5}, 5), ({"max_logprobs": -1}, -1)):
        processor = make(**changes)
        processor.process([5], SamplingParams(**{field: most}), request_id="a")
        with pytest.raises(InvalidRequestError, match="larger --max-logprobs") as caught:
            params = SamplingParams(**{field: 10**6 if most == -1 else most + 1})
            processor.process([5], params, request_id="b")
        assert caught.value.param == field


def test_priority_and_cache_salt_are_passed_on() -> None:
    prompt = {"prompt": "a", "cache_salt": "tenant"}
    request = make().process(prompt, SamplingParams(), request_id="r", priority=-3)
    assert (request.priority, request.cache_salt) == (-3, "tenant")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 2**64}, "priority"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": 3}, "request_id"),
        ({"sampling_params": {"temperature": 0}}, None),
        ({"sampling_params": SamplingParams(stop_token_ids=[300])}, "stop_token_ids"),
        ({"sampling_params": SamplingParams(stop="\ud800")}, "stop"),
    ],
)
def test_other_invalid_arguments_are_rejected(changes: dict, param: str | None) -> None:
    arguments = {"sampling_params": SamplingParams(), "request_id": "r", **changes}
    with pytest.raises(InvalidRequestError) as caught:
        make().process("a", **arguments)
    assert caught.value.param == param


def test_text_of_a_prompt() -> None:
    assert text_of_prompt("a") == "a"
    assert text_of_prompt({"prompt": "a", "prompt_token_ids": [1]}) == "a"
    assert text_of_prompt({"prompt_token_ids": [1]}) is None
    assert text_of_prompt([1]) is None


class WordTokenizer:
    """A tokenizer of a few texts."""

    eos_token_id = EOS_ID
    vocab_size = 290  # fewer than the model's
    token_ids = {
        # As one token inside a text, and another at its start.
        "no": [5],
        " no": [6],
        # With a space before it, it is a space and then the same.
        "never": [7, 8],
        " never": [32, 7, 8],
        # The same first token.
        "ever": [9, 10],
        " ever": [9, 11],
        "long": list(range(17)),
        " long": list(range(17)),
        "foreign": [300],
        " foreign": [300],
        "": [],
        " ": [32],
    }

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self.token_ids[text]

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        assert not skip_special_tokens
        return token_id < self.vocab_size


def process_words(*words: str, **params: object) -> tuple[tuple[int, ...], ...]:
    processor = make(tokenizer=WordTokenizer())
    return process(processor, [97], bad_words=list(words), **params).bad_words_token_ids


def test_bad_words_are_tokenized_with_and_without_a_space() -> None:
    assert process_words("no") == ((5,), (6,))
    assert process_words(" no", "no") == ((5,), (6,))
    assert process_words("never", "ever") == ((7, 8), (9, 10))
    assert process_words() == ()


@pytest.mark.parametrize("word", ["long", "foreign", " "])
def test_bad_word_without_valid_tokens_is_rejected(word: str) -> None:
    with pytest.raises(InvalidRequestError, match="bad word") as caught:
        process_words(word)
    assert caught.value.param == "bad_words"


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias instead"):
        process(make(tokenizer=None), [97], bad_words=["no"])


@pytest.mark.parametrize("params", [{"allowed_token_ids": [300]}, {"logit_bias": {300: 1.0}}])
def test_token_that_the_model_does_not_have_is_refused(params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="has 300") as caught:
        process(make(), [97], **params)
    assert caught.value.param in params


def test_settings_that_allow_no_token_are_rejected() -> None:
    assert process_words("no", allowed_token_ids=[5, 6, 7]) == ((5,), (6,))
    with pytest.raises(InvalidRequestError, match="leaves no token"):
        process_words("no", allowed_token_ids=[5, 6])
    process(make(), [97], allowed_token_ids=[EOS_ID])
    with pytest.raises(InvalidRequestError, match="leaves no token"):
        process(make(), [97], allowed_token_ids=[EOS_ID], min_tokens=1)

    # Also without `allowed_token_ids`.
    whole = list(range(300))
    assert process(make(), [97], stop_token_ids=whole).scarce_token_ids == ()
    with pytest.raises(InvalidRequestError, match="300 token ids leave no token") as caught:
        process(make(), [97], stop_token_ids=whole, min_tokens=1)
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("words", "params", "wanted"),
    [
        (["ever"], {"allowed_token_ids": [9, 10]}, ()),
        (["ever"], {"allowed_token_ids": [10]}, (10,)),
        (["ever", "never"], {"allowed_token_ids": [10, 8, 10]}, (10, 8)),
        # 5 and 6 are bad words, so they are never sampled.
        (["ever", "no"], {"allowed_token_ids": [5, 10, 6]}, (10,)),
        (["ever"], {"allowed_token_ids": [10, 4], "stop_token_ids": [4]}, ()),
        (["ever"], {"allowed_token_ids": [10, 4], "stop_token_ids": [4], "min_tokens": 2}, (10, 4)),
        (["ever"], {"allowed_token_ids": [10, EOS_ID], "min_tokens": 2}, (10, EOS_ID)),
        (["ever", "no"], {}, ()),
        # Every token of the vocabulary may be forbidden.
        (["ever"], {"stop_token_ids": [*range(10), *range(11, 300)], "min_tokens": 1}, "all"),
    ],
)
def test_tokens_that_may_all_be_forbidden_later_are_scarce(
    words: list[str], params: dict[str, object], wanted: object
) -> None:
    processor = make(tokenizer=WordTokenizer())
    found = process(processor, [97], bad_words=words, **params).scarce_token_ids
    assert found == (tuple(range(300)) if wanted == "all" else wanted)


def test_allowed_ids_without_a_token_are_ignored() -> None:
    processor = make(tokenizer=WordTokenizer())
    with pytest.raises(InvalidRequestError, match="tokenizer has 290 tokens") as raised:
        process(processor, [97], allowed_token_ids=[290, 299])
    assert raised.value.param == "allowed_token_ids"
    assert process(processor, [97], allowed_token_ids=[5, 290]).scarce_token_ids == ()
    # The other allowed tokens are bad words.
    with pytest.raises(InvalidRequestError, match="leaves no token"):
        process(processor, [97], allowed_token_ids=[5, 6, 290], bad_words=["no"])


class FakeChecker:
    """Accepts only the regex "good", whose result is cached."""

    def is_remembered(self, params: StructuredOutputsParams) -> bool:
        return params.regex == "good"

    def is_heavy(self, params: StructuredOutputsParams) -> bool:
        return params.disable_any_whitespace

    def check(self, params: StructuredOutputsParams) -> None:
        if params.regex != "good":
            raise InvalidRequestError("not good", param="structured_outputs")


def test_grammar_is_checked_here_and_awaited_in_the_engine() -> None:
    processor = make(grammar_checker=FakeChecker())
    good = StructuredOutputsParams(regex="good")
    bad = StructuredOutputsParams(regex="bad")
    assert process(processor, "a", structured_outputs=good).needs_grammar
    assert not process(processor, "a").needs_grammar
    assert not process(processor, "a", structured_outputs=good).has_heavy_grammar
    # With a grammar, `scarce_token_ids` is empty.
    scarce = {"allowed_token_ids": [97], "bad_words": ["aa"]}
    assert process(processor, "a", **scarce).scarce_token_ids == (97,)
    assert process(processor, "a", structured_outputs=good, **scarce).scarce_token_ids == ()
    heavy = StructuredOutputsParams(regex="good", disable_any_whitespace=True)
    assert process(processor, "a", structured_outputs=heavy).has_heavy_grammar
    with pytest.raises(InvalidRequestError, match="not good"):
        process(processor, "a", structured_outputs=bad)
    assert processor.unchecked_grammar(SamplingParams(structured_outputs=bad)) is bad
    assert processor.unchecked_grammar(SamplingParams(structured_outputs=good)) is None
    assert processor.unchecked_grammar(SamplingParams()) is None
    unchecked = SamplingParams(structured_outputs=bad)
    processor.process("a", unchecked, request_id="r", checks_grammar=False)
    with pytest.raises(UnsupportedFeatureError, match="EOS token"):
        process(make(), "a", structured_outputs=good)


def test_prompt_can_be_truncated_to_its_last_tokens() -> None:
    def cut(num_tokens: object, default: int | None = None, **params: object) -> list[int]:
        prompt = {"prompt_token_ids": list(range(150)), "truncate_prompt_tokens": num_tokens}
        return process(make(default_max_tokens=default), prompt, **params).prompt_token_ids

    assert cut(3) == [147, 148, 149]
    # The output's room is reserved from 100 tokens in all.
    assert cut(-1, max_tokens=40) == list(range(90, 150))
    assert cut(-1, max_tokens=None) == list(range(51, 150))
    assert cut(-1, default=30, max_tokens=None) == list(range(80, 150))
    assert cut(-1, default=30, max_tokens=40) == list(range(90, 150))
    for bad in (0, -2, 2.5, True, "most"):
        with pytest.raises(InvalidRequestError) as raised:
            cut(bad)
        assert raised.value.param == "truncate_prompt_tokens"


def test_request_has_the_number_of_truncated_tokens() -> None:
    for how, num_cut in ((None, 0), (3, 87), (200, 0), ("auto", 0), (-1, 30)):
        prompt = {"prompt_token_ids": list(range(90)), "truncate_prompt_tokens": how}
        assert process(make(), prompt, max_tokens=40 if how == -1 else 1).num_truncated_tokens == (
            num_cut
        )


def test_prompt_can_be_truncated_at_its_end() -> None:
    def cut(side: object, num_tokens: object = 3) -> list[int]:
        prompt = {"prompt_token_ids": list(range(150)), "truncate_prompt_tokens": num_tokens}
        return process(make(), prompt | {"truncation_side": side}).prompt_token_ids

    assert cut("right") == [0, 1, 2]
    assert cut("left") == cut(None) == [147, 148, 149]
    assert cut("right", "auto") == list(range(len(cut("left", "auto"))))
    with pytest.raises(InvalidRequestError, match='"left" or "right", got 3') as raised:
        cut(3)
    assert raised.value.param == "truncation_side"


def _cut(
    how: object, num_tokens: int, max_tokens: int | None, *, cuts: bool = False, **changes: object
) -> tuple[int, int]:
    """The number of prompt tokens and `max_tokens` after truncation of `num_tokens` tokens."""
    prompt = {"prompt_token_ids": list(range(num_tokens)), "truncate_prompt_tokens": how}
    params = SamplingParams(max_tokens=max_tokens, min_tokens=changes.pop("min_tokens", 0))
    request = make(**changes).process(prompt, params, request_id="r", cuts_max_tokens=cuts)
    num_kept = len(request.prompt_token_ids)
    assert request.prompt_token_ids == list(range(num_tokens - num_kept, num_tokens))
    return num_kept, request.sampling_params.max_tokens


@pytest.mark.parametrize("num_tokens", [18, 98, 99, 100, 150])
def test_truncation_reserves_no_more_room_than_exists(num_tokens: int) -> None:
    # The rule does not depend on the prompt's length.
    assert _cut(-1, num_tokens, 99) == (1, 99)
    for max_tokens in (100, 5000):
        with pytest.raises(InvalidRequestError, match=f"={max_tokens} .* max_model_len=100") as e:
            _cut(-1, num_tokens, max_tokens)
        assert e.value.param == "max_tokens"
    # 40 positions, and one last token that needs no position.
    assert _cut(-1, num_tokens, 40, max_fitting_tokens=40) == (1, 40)
    with pytest.raises(InvalidRequestError, match="may have 41 tokens .* at most 40 tokens"):
        _cut(-1, num_tokens, 41, max_fitting_tokens=40)


@pytest.mark.parametrize("max_tokens", [30, 99, 100, 5000, None])
def test_fitting_prompt_is_not_truncated_for_a_default_max_tokens(max_tokens) -> None:
    rest = 30 if max_tokens == 30 else 50
    for num_tokens, wanted in ((60, (60, min(max_tokens or 40, 40))), (99, (99, 1))):
        assert _cut("auto", num_tokens, max_tokens) == wanted
        assert _cut(-1, num_tokens, max_tokens, cuts=True) == wanted
        assert _cut(-1, num_tokens, None, default_max_tokens=max_tokens) == wanted
    # A longer prompt loses at most half of the room; without `max_tokens`, only one token's.
    wanted = (99, 1) if max_tokens is None else (100 - rest, rest)
    for num_tokens in (100, 150):
        assert _cut("auto", num_tokens, max_tokens) == wanted
        assert _cut(-1, num_tokens, max_tokens, cuts=True) == wanted
        assert _cut(-1, num_tokens, None, default_max_tokens=max_tokens) == wanted


def test_truncated_prompt_is_never_rejected() -> None:
    small = {"max_fitting_tokens": 40}
    for how, num_tokens, max_tokens, changes, wanted in (
        (-1, 150, 20, small, (21, 20)),
        (-1, 150, None, small, (40, 1)),
        ("auto", 41, 60, small, (21, 20)),
        ("auto", 8, 60, small, (8, 33)),
        (-1, 150, 20, {"max_prompt_tokens": 32}, (32, 20)),
        ("auto", 32, 80, {"max_prompt_tokens": 32}, (32, 68)),
        ("auto", 33, 20, {"max_prompt_tokens": 32}, (32, 20)),
        ("auto", 150, 90, {"min_tokens": 70}, (30, 70)),
    ):
        assert _cut(how, num_tokens, max_tokens, **changes) == wanted
