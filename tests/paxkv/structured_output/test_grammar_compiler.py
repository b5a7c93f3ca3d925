"""Forms become matchers; malformed or too large forms are rejected with the reason."""

import concurrent.futures
import json
import re
import threading
import time

import numpy as np
import pytest

from paxkv.config.structured_outputs_params import MAX_CHOICES, StructuredOutputsParams
from paxkv.errors import InvalidRequestError
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.structured_output.plain_reasons import MAX_REASON_CHARS
from tests.paxkv.structured_output.demo_grammars import EOS, TOKENIZER, VOCAB_SIZE, make_compiler

ENDS = [TOKENIZER.token_to_id(text) for text in ('"', "}")]


def _draw(
    compiler: GrammarCompiler, params: StructuredOutputsParams, seed: int, max_tokens: int = 300
) -> str:
    """Text of tokens drawn at random among those allowed, up to the end of the grammar."""
    matcher = compiler.compile(params)
    draws = np.random.default_rng(seed)
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        # Ends as soon as it may, strings and objects too: some grammars could go on for ever.
        closing = [i for i in ENDS if i in allowed and draws.random() < 0.3]
        token_id = EOS if EOS in allowed else int(draws.choice(closing or allowed))
        assert matcher.consume_token(token_id)
        if token_id == EOS:
            return TOKENIZER.decode(token_ids)
        token_ids.append(token_id)
    raise AssertionError(f"no end after {max_tokens} tokens: {TOKENIZER.decode(token_ids)!r}")


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "c": {"enum": ["red", "é"]}},
    "required": ["n", "c"],
    "additionalProperties": False,
}
TAG = {
    "triggers": ["<f"],
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
}


def _is_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"n", "c"} and type(value["n"]) is int and value["c"] in ("red", "é")


FORMS = {
    "json": (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), _is_schema),
    "json text": (
        StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True),
        lambda text: _is_schema(text) and " " not in text,
    ),
    "json_object": (
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": (
        StructuredOutputsParams(regex=r"\d{3}-(a|b)+!"),
        lambda text: bool(re.fullmatch(r"\d{3}-(a|b)+!", text)),
    ),
    "choice": (
        StructuredOutputsParams(choice=['say "hi"', "no", "né\n"]),
        lambda text: text in ('say "hi"', "no", "né\n"),
    ),
    "any JSON": (
        StructuredOutputsParams(json="true", disable_any_whitespace=True),
        lambda text: json.loads(text) is not NotImplemented,
    ),
    "lark": (
        StructuredOutputsParams(grammar='start: "a" start "b" | "c"'),
        lambda text: bool(re.fullmatch("a*cb*", text)) and text.count("a") == text.count("b"),
    ),
    "gbnf": (
        StructuredOutputsParams(grammar='root ::= "yes" | "no"'),
        lambda text: text in ("yes", "no"),
    ),
}


FORMS |= {
    "white space": (
        StructuredOutputsParams(json=SCHEMA, whitespace_pattern="~"),
        lambda text: _is_schema(text.replace("~", "")) and "~~" not in text,
    ),
    "closed objects": (
        StructuredOutputsParams(
            json={"anyOf": [{"type": "object", "properties": {}}]},
            disable_additional_properties=True,
            disable_any_whitespace=True,
        ),
        lambda text: text == "{}",
    ),
    "what looks like a schema": (
        StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {
                    "const": {"type": "object", "properties": {}},
                    "properties": {"enum": [{"properties": {}}]},
                },
                "required": ["const", "properties"],
            },
            disable_additional_properties=True,
            disable_any_whitespace=True,
        ),
        lambda text: text == '{"const":{},"properties":{"properties":{}}}',
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_drawn_texts_have_the_form(name):
    params, has_form = FORMS[name]
    compiler = make_compiler()
    texts = {_draw(compiler, params, seed) for seed in range(6)}
    assert all(map(has_form, texts)), texts


def test_the_largest_accepted_number_of_choices_works():
    choices = [f"c{i}" for i in range(MAX_CHOICES)]
    params = StructuredOutputsParams(choice=choices)
    assert {_draw(make_compiler(), params, seed) for seed in range(3)} <= set(choices)


def test_a_structural_tag_constrains_only_the_text_after_its_trigger():
    compiler = make_compiler()
    params = StructuredOutputsParams(structural_tag=json.dumps(TAG))
    good = 'free text <f=a>{"n": 1, "c": "red"}</f> and more'
    matcher = compiler.compile(params)
    assert matcher.consume_tokens(TOKENIZER.encode(good))
    bad = compiler.compile(params)
    assert not bad.consume_tokens(TOKENIZER.encode('free text <f=a>{"n": "'))


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize(
    ("options", "written", "refused"),
    [
        ({}, '{"n": 1,"m":2}', '{"n":' + " " * 40 + "1}"),
        ({"disable_any_whitespace": True}, '{"n":1}', '{"n": 1}'),
        ({"whitespace_pattern": "~"}, '{"n":~1}', '{"n": 1}'),
        ({"disable_additional_properties": True}, '{"n": 1}', '{"n":1,"m":2}'),
    ],
)
def test_both_forms_of_a_structural_tag_follow_the_json_options(
    is_older, options, written, refused
):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"begin": "<f>", "content": content, "end": "</f>"}
    form: dict[str, object] = {
        "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}
    }
    if is_older:
        structure = {"begin": "<f>", "schema": schema, "end": "</f>"}
        form = {"triggers": ["<f"], "structures": [structure]}
    params = StructuredOutputsParams(structural_tag=json.dumps(form), **options)
    for text, fits in ((written, True), (refused, False)):
        token_ids = TOKENIZER.encode(f"<f>{text}</f>")
        num_valid = make_compiler().compile(params).validate_tokens(token_ids)
        assert (num_valid == len(token_ids)) is fits, text


MALFORMED = {
    "regex": ({"regex": "(a"}, "unclosed group"),
    "lookahead": ({"regex": "(?=a)b"}, "look-around"),
    "no text": ({"regex": r"[^\s\S]"}, "."),
    "schema of nothing": ({"json": "false"}, "no value fits"),
    "schema type": ({"json": {"type": "colour"}}, "type"),
    "schema text": ({"json": '{"type": '}, "."),
    "unknown type": (
        {"json": {"items": {"type": "any"}}},
        '"type" at #/items is "any"',
    ),
    "reference to nothing": (
        {"json": {"items": {"$ref": "#/$defs/a"}}},
        '"\\$ref" at #/items is "#/\\$defs/a"',
    ),
    "reference to itself": ({"json": {"$ref": "#"}}, '"\\$ref" at # leads back to itself'),
    "strict schema": (
        {"json": {"x-paxkv-strict": True, "items": {"not": {"const": 1}}}},
        'enforce "not": {"const": 1} at #/items/not;',
    ),
    "remote schema": ({"json": {"$ref": "http://127.0.0.1:1/a"}}, "not fetch"),
    "file schema": ({"json": {"$ref": "file:///etc/passwd"}}, "not fetch"),
    "white space": ({"json": "{}", "whitespace_pattern": "("}, "."),
    "closed text": ({"json": "{", "disable_additional_properties": True}, "."),
    "lark": ({"grammar": "start: foo"}, "unknown name"),
    "gbnf": ({"grammar": 'root ::= "a'}, "GBNF"),
    "tag": ({"structural_tag": "{}"}, "structures"),
    "tag text": ({"structural_tag": "{"}, "."),
    "tag list": ({"structural_tag": '{"triggers": ["a"], "structures": [5]}'}, "begin"),
    "tag trigger": (
        {
            "structural_tag": '{"triggers": ["x"], '
            '"structures": [{"begin": "<a>", "schema": {}, "end": ""}]}'
        },
        "no trigger",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_cannot_be_compiled_is_refused_with_the_reason(name):
    fields, reason = MALFORMED[name]
    with pytest.raises(InvalidRequestError, match="cannot be compiled") as raised:
        make_compiler().compile(StructuredOutputsParams(**fields))
    assert re.search(reason, str(raised.value))
    assert raised.value.param == f"structured_outputs.{next(iter(fields))}"
    assert len(str(raised.value)) < MAX_REASON_CHARS + 100


BOMBS = {
    "counted twice": {"regex": "(a{1000}){1000}"},
    "counted five times": {"regex": "((((a{100}){100}){100}){100}){100}"},
    "deep groups": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "deep schema": {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "deep grammar": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "endless reference": {"json": {"$ref": "#"}},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_that_grows_without_end_is_refused_soon(name):
    compiler = make_compiler()
    start_s = time.monotonic()
    with pytest.raises(InvalidRequestError):
        compiler.compile(StructuredOutputsParams(**BOMBS[name]))
    assert time.monotonic() - start_s < 60  # it would be minutes, or for ever


X_AND_ON = ["[a-z]{10}!", "x+", "x"]  # the second takes all that the third could
ENDLESS = {
    "grammar": {"grammar": 'start: /[a-z]{10}!/ A "x"\nA: /x+/'},
    "options of its own": {
        "grammar": '%llguidance {"no_forcing": false}\nstart: /[a-z]{10}!/ A "x"\nA: /x+/'
    },
    "gbnf": {"grammar": 'root ::= [a-z]{10} "!" a "x"\na ::= [x]+'},
    "format": {
        "structural_tag": json.dumps(
            {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "regex", "pattern": part} for part in X_AND_ON],
                }
            }
        )
    },
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_grammar_that_never_ends_does_not_stop_a_step(name):
    matcher = make_compiler().compile(StructuredOutputsParams(**ENDLESS[name]))
    assert matcher.consume_tokens(TOKENIZER.encode("abcdefghij!"))
    # It would never come back.
    thread = threading.Thread(target=matcher.compute_bitmask, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert matcher.consume_tokens(TOKENIZER.encode("xxx"))


def test_white_space_in_json_is_bounded_or_absent():
    compiler = make_compiler()
    flexible = compiler.compile(StructuredOutputsParams(json=SCHEMA))
    assert flexible.consume_tokens(TOKENIZER.encode('{ \n  "n": 1,'))
    endless = compiler.compile(StructuredOutputsParams(json=SCHEMA))
    assert not endless.consume_tokens(TOKENIZER.encode("{" + " " * 33))
    tight = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    assert not compiler.compile(tight).consume_tokens(TOKENIZER.encode('{ "n"'))


def test_copies_of_a_grammar_advance_independently():
    compiler = make_compiler()
    params = StructuredOutputsParams(choice=["ab", "ba"])
    first, second = compiler.compile(params), compiler.compile(params)
    assert first.consume_tokens(TOKENIZER.encode("ab"))
    assert second.consume_tokens(TOKENIZER.encode("ba"))


def test_threads_compile_side_by_side():
    compiler = make_compiler()
    params = [StructuredOutputsParams(regex=f"a{i}b" * 20) for i in range(20)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(compiler.compile, params * 2))
    for i, matcher in enumerate(matchers):
        assert matcher.consume_tokens(TOKENIZER.encode(f"a{i % 20}b" * 20))


def test_tokens_that_the_tokenizer_does_not_have_are_never_allowed():
    matcher = make_compiler().compile(StructuredOutputsParams(regex="(.|\n)*"))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits)
    assert allowed.size > 600 and EOS in allowed
    assert allowed.max() < TOKENIZER.vocab_size < VOCAB_SIZE
