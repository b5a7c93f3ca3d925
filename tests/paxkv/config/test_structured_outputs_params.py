"""Exactly one kind of grammar can be set."""

import pytest

from paxkv.config.structured_outputs_params import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    FormField,
    StructuredOutputsParams,
)
from paxkv.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"json": {"type": "object"}}, "json", '{"type": "object"}'),
        ({"json": '{"type":"object"}'}, "json", '{"type":"object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["é", "b"]}, "choice", '["é", "b"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json_object": True, "regex": None}, "json_object", "true"),
        ({"structural_tag": "{}", "json_object": False}, "structural_tag", "{}"),
    ],
)
def test_the_kind_is_the_field_that_is_set(fields, kind, source):
    params = StructuredOutputsParams(**fields)
    assert (params.kind, params.source_text) == (kind, source)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json_object": False},
        {"json_object": 1},
        {"json_object": "yes"},
        {"json": {}, "regex": "a"},
        {"regex": ""},
        {"regex": 5},
        {"json": [1]},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", ""]},
        {"choice": ["a"] * (MAX_CHOICES + 1)},
        {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)},
        {"json_object": True, "disable_any_whitespace": 1},
        {"json_object": True, "disable_additional_properties": 0},
        {"json_object": True, "whitespace_pattern": ""},
        {"json_object": True, "whitespace_pattern": " " * 300},
        {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
        {"json_object": True, "thoughts": "many"},
    ],
)
def test_other_values_are_rejected(fields):
    with pytest.raises(InvalidRequestError) as raised:
        StructuredOutputsParams(**fields)
    assert raised.value.param.partition(".")[0] == "structured_outputs"
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json": {"const": "a\ud800"}}, "structured_outputs.json"),
        ({"choice": ["a\ud800"]}, "structured_outputs.choice"),
        ({"regex": "a\ud800"}, "structured_outputs.regex"),
    ],
)
def test_a_lone_surrogate_is_rejected(fields, param):
    with pytest.raises(InvalidRequestError, match=r"has a lone surrogate, '\\ud800'") as raised:
        StructuredOutputsParams(**fields)
    assert raised.value.param == param


def test_errors_name_the_request_field_of_the_grammar():
    fields = (FormField(name="tools"), FormField(name="tools[3].input_schema", tool="f"))
    with pytest.raises(InvalidRequestError, match="^tools has 262150 characters") as raised:
        StructuredOutputsParams(json="a" * 262_150, sent_in=fields)
    assert raised.value.param == "tools"
    form = StructuredOutputsParams(json="{}", sent_in=fields)
    assert str(form.field_of("f")) == 'tools[3].input_schema (tool "f")'
    assert form.field_of().name == form.field_of("g").name == "tools"
    assert form == StructuredOutputsParams(json="{}")
    assert StructuredOutputsParams(regex="a").field_of().name == "structured_outputs.regex"
