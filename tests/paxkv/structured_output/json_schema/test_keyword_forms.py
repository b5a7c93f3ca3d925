"""Limits of the wrong type are ignored, or refused with their value and the allowed type."""

import json

import pytest

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.structured_output.form_errors import FormError
from paxkv.structured_output.json_schema.keyword_forms import shown, wrong_form, wrong_limit
from paxkv.structured_output.json_schema.schema_parts import find_schema_parts
from tests.paxkv.structured_output.demo_grammars import make_compiler

COMPILER = make_compiler()
COUNT = "a whole number from 0 on"
FORMS = {
    "minLength": ("string", COUNT),
    "maxLength": ("string", COUNT),
    "minItems": ("array", COUNT),
    "maxItems": ("array", COUNT),
    "minProperties": ("object", COUNT),
    "maxProperties": ("object", COUNT),
    "minimum": ("number", "a number"),
    "maximum": ("integer", "a number"),
    "exclusiveMinimum": ("number", "a number or a boolean"),
    "exclusiveMaximum": ("number", "a number or a boolean"),
    "multipleOf": ("integer", "a number"),
    "pattern": ("string", "a string"),
    "format": ("string", "a string"),
}


def _wrong_values(form):
    if form == "a string":
        return [5, True, ["a"], {}]
    values = ["a", "3", [], [5], {"a": 1}]
    if form == COUNT:
        values += [-1, 1.5, True]
    return values + ([True] if form == "a number" else [])


def _check(schema):
    return COMPILER.check(StructuredOutputsParams(json=json.dumps(schema)))


@pytest.mark.parametrize("keyword", FORMS)
def test_a_limit_of_the_wrong_form_is_ignored_or_named_with_its_value(keyword):
    kind, form = FORMS[keyword]
    for value in _wrong_values(form):
        schema = {"properties": {"a": {"type": kind, keyword: value}}}
        assert _check(schema) == (f"#/properties/a/{keyword}",)
        with pytest.raises(FormError) as raised:
            _check(schema | {"x-paxkv-strict": True})
        assert str(raised.value) == (
            f"structured_outputs.json cannot be compiled: #/properties/a/{keyword} is "
            f"{json.dumps(value)}; it must be {form}; correct it, or send strict: false to have it "
            "ignored."
        )


@pytest.mark.parametrize("keyword", FORMS)
def test_a_limit_of_the_right_form_is_enforced(keyword):
    kind, form = FORMS[keyword]
    value = {"pattern": "a+", "format": "date"}.get(keyword, 3)
    for right in (value, None) if form == "a string" else (value, 3.0, None):
        assert _check({"type": kind, keyword: right, "x-paxkv-strict": True}) == ()


def test_each_keyword_has_one_form():
    (part,) = find_schema_parts({"minLength": "a", "required": "a", "title": 5})
    # Limits are not looked at, as they may be ignored.
    assert wrong_form(part) == '#/required is "a"; it must be a list of strings'
    assert wrong_limit(part, "minLength") == f'#/minLength is "a"; it must be {COUNT}'
    assert wrong_limit(part, "required") is wrong_limit(part, "title") is None
    assert shown("é" * 99) == '"' + "é" * 99 + "..."


def test_a_strict_refusal_shows_the_value():
    with pytest.raises(
        FormError, match=r'no grammar can enforce "pattern": "\(\?=a\)" at #/pattern;'
    ):
        _check({"type": "string", "pattern": "(?=a)", "x-paxkv-strict": True})
