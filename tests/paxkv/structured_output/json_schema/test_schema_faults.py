"""If a schema cannot be compiled, the error names the mistake and its place."""

import json

import pytest

from paxkv.config.structured_outputs_params import FormField, StructuredOutputsParams
from paxkv.structured_output.form_errors import FormError
from paxkv.structured_output.grammar_compiler import LIMITS
from paxkv.structured_output.grammar_tokenizer import make_grammar_tokenizer
from paxkv.structured_output.json_schema.schema_faults import find_fault
from paxkv.structured_output.json_schema.schema_probe import LlguidanceProbe
from tests.paxkv.structured_output.demo_grammars import SETUP, make_compiler

WRONG = [
    ({"properties": 5}, "#/properties/x/properties is 5; it must be an object whose values are"),
    ({"properties": {"a/b": 5}}, "#/properties/x/properties/a~1b is 5; a schema in"),
    ({"patternProperties": []}, "#/properties/x/patternProperties is [];"),
    ({"required": "a"}, '#/properties/x/required is "a"; it must be a list of strings'),
    ({"required": ["a", 5]}, "#/properties/x/required/1 is 5; an entry"),
    ({"items": "a"}, '#/properties/x/items is "a"; it must be an object or a boolean'),
    ({"items": [{}, 5]}, "#/properties/x/items/1 is 5; a schema in"),
    ({"additionalProperties": 5}, "#/properties/x/additionalProperties is 5;"),
    ({"enum": None}, "#/properties/x/enum is null; it must be a list of values"),
    ({"allOf": {}}, "#/properties/x/allOf is {}; it must be a list of schemas"),
    ({"anyOf": [{}, "a"]}, '#/properties/x/anyOf/1 is "a";'),
    ({"oneOf": 5}, "#/properties/x/oneOf is 5;"),
    ({"prefixItems": {}}, "#/properties/x/prefixItems is {};"),
    ({"type": ["string", 5]}, '#/properties/x/type is ["string", 5]; it must be'),
    ({"$ref": 5}, "#/properties/x/$ref is 5; it must be a string"),
    ({"items": [{}], "additionalItems": 5}, "#/properties/x/additionalItems is 5; it must be an"),
    ({"enum": [{"a": float("nan")}]}, "#/properties/x/enum/0/a is NaN, which is not a JSON number"),
    ({"const": float("-inf")}, "#/properties/x/const is -Infinity, which is not a JSON number"),
    ({"$ref": "http://x/y"}, '"$ref" at #/properties/x is "http://x/y", which is another document'),
]
IMPOSSIBLE = [
    ({"enum": []}, '#/properties/x, which is {"enum": []}; correct'),
    ({"type": "string", "const": 5}, "#/properties/x, which is"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "#/properties/x, which is"),
    (
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
        "#/properties/x/properties/a, which is",
    ),
    (
        {"type": "array", "minItems": 1, "items": {"type": "string", "enum": [1]}},
        "#/properties/x/items, which is",
    ),
    ({"allOf": [{}, {"type": "string", "enum": [1]}]}, "#/properties/x/allOf/1, which is"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "#/properties/x, which is"),
    # Keywords that no grammar can enforce do not hide the mistake, and are shown as they were sent.
    (
        {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
        '#/properties/x/properties/a, which is {"not": {}}; correct',
    ),
    (
        {"type": "string", "format": "byte", "minLength": 5, "maxLength": 2},
        '#/properties/x, which is {"type": "string", "format": "byte", "minLength": 5',
    ),
    # An impossible choice or an impossible optional property does not make the whole impossible.
    (
        {
            "type": "object",
            "properties": {"a": {"enum": []}, "b": {"anyOf": [{"enum": []}, {}]}, "c": False},
            "required": ["b", "c"],
        },
        "#/properties/x, which is",
    ),
]
REFERENCE = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/d"}}


def test_good_schemas_and_other_kinds_of_grammars_have_no_faults():
    probe = LlguidanceProbe(make_grammar_tokenizer(**SETUP), LIMITS)
    good = {"properties": None, "items": [{}, True], "enum": [5], "minItems": 2.0}
    for schema in (good, True, 5, {"type": "string", "pattern": "("}):
        assert find_fault(schema, probe) is None


def _message(schema, sent_in=()):
    return _text_message(json.dumps(schema), sent_in)


def _text_message(text, sent_in=()):
    params = StructuredOutputsParams(json=text, sent_in=sent_in)
    with pytest.raises(FormError) as caught:
        make_compiler().check(params)
    return str(caught.value), caught.value.param


def _around(inner):
    definitions = {"d": {"type": "string", "enum": [1]}}
    return {
        "type": "object",
        "properties": {"x": inner},
        "required": ["x"],
        "$defs": definitions,
    }


@pytest.mark.parametrize(("schema", "words"), WRONG)
def test_a_keyword_of_the_wrong_form_is_named_with_its_place(schema, words):
    message, _ = _message(_around(schema))
    assert message.startswith(f"structured_outputs.json cannot be compiled: {words}"), message


@pytest.mark.parametrize(
    ("schema", "words"), [*IMPOSSIBLE, (REFERENCE, '#/$defs/d, which is {"type": "string"')]
)
def test_a_schema_that_no_value_fits_is_named_with_its_place(schema, words):
    message, _ = _message(_around(schema))
    assert f"cannot be compiled: no value fits the schema at {words}" in message, message


@pytest.mark.parametrize(("schema", "words"), [WRONG[0], (REFERENCE, "#/$defs/d, which is")])
def test_the_error_names_the_tool_with_the_wrong_schema(schema, words):
    calls = [
        {"properties": {"parameters": {**inner, "$id": f"tool:{name}"}}, "required": ["parameters"]}
        for name, inner in (("f", {"type": "object"}), ("g", _around(schema)))
    ]
    sent_in = (
        FormField(name="tools"),
        FormField(name="tools[0].input_schema", tool="f"),
        FormField(name="tools[3].input_schema", tool="g"),
    )
    message, param = _message({"type": "array", "items": {"anyOf": calls}}, sent_in)
    assert message.startswith('tools[3].input_schema (tool "g") cannot be compiled:')
    assert words in message and param == "tools[3].input_schema"


def test_the_error_says_that_a_schema_is_false():
    for text in ("false", " false"):
        message, _ = _text_message(text)
        assert message == (
            "structured_outputs.json cannot be compiled: no value fits the schema, which is false; "
            "send one that allows a value."
        )
    assert "which is {}" not in _message({"not": {}})[0]
    tag = {"type": "tag", "begin": "a", "end": "b", "content": {"type": "json_schema"}}
    tag["content"]["json_schema"] = False
    with pytest.raises(FormError, match="no value fits the schema, which is false; send"):
        make_compiler().check(StructuredOutputsParams(structural_tag=json.dumps({"format": tag})))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5", "a schema is an object or a boolean, got 5."),
        ("NaN", "# is NaN, which is not a JSON number; send a finite one."),
        ('{"const": 1e400}', "#/const is Infinity, which is not a JSON number"),
        ('{"enum": ["\\ud800"]}', '#/enum/0 is "\\ud800", which has half a character'),
        ('{"properties": {"\\udc00": {}}}', 'a name in #/properties is "\\udc00", which'),
        ('{"type": "string",}', "it is not JSON (Expecting property name enclosed in double"),
        ("{'a': 1}", """got "{'a': 1}"; send a JSON schema as JSON."""),
        ('{"x-guidance": {"a": 1}}', '#/x-guidance is {"a": 1}: unknown field `a`'),
        ('{"items":' * 300 + "{}" + "}" * 300, "it is nested too deeply."),
    ],
)
def test_a_text_that_is_no_schema_is_named_with_the_mistake(text, words):
    assert words in _text_message(text)[0]


@pytest.mark.parametrize(
    "text", ['{"maximum": 1e400}', '{"minimum": NaN}', '{"const": "\\ud83d\\ude00"}']
)
def test_numbers_that_bound_nothing_and_whole_characters_pass(text):
    assert make_compiler().check(StructuredOutputsParams(json=text)) == ()


def test_a_schema_within_a_structural_tag_is_searched_too():
    tag = {"begin": "<f>", "schema": {"properties": {"a": {"required": 5}}}, "end": "</f>"}
    form = {"triggers": ["<f"], "structures": [tag]}
    with pytest.raises(FormError, match="#/properties/a/required is 5; it must be a list"):
        make_compiler().check(StructuredOutputsParams(structural_tag=json.dumps(form)))
