"""Keywords that no grammar can enforce are left out and reported; strict schemas are refused."""

import json

import pytest

from paxkv.structured_output.form_errors import SchemaError
from paxkv.structured_output.grammar_compiler import LIMITS
from paxkv.structured_output.grammar_tokenizer import make_grammar_tokenizer
from paxkv.structured_output.json_schema.schema_cleaner import SchemaCleaner
from paxkv.structured_output.json_schema.schema_probe import LlguidanceProbe
from tests.paxkv.structured_output.demo_grammars import SETUP

PROBE = LlguidanceProbe(make_grammar_tokenizer(**SETUP), LIMITS)
S, I = {"type": "string"}, {"type": "integer"}  # noqa: E741
ANY_TWO = {"properties": {"a": {}, "b": {}}}

# Keywords that llguidance does not implement, and what is left.
NEVER = [
    ({"uniqueItems": True}, {}, "uniqueItems"),
    ({"contains": S, "minContains": 2}, {}, "contains"),
    ({"not": {"const": 1}}, {}, "not"),
    ({"if": S, "then": {"minLength": 1}, "else": I}, {}, "if"),
    ({"dependentRequired": {"a": ["b"]}}, {}, "dependentRequired"),
    ({"dependentSchemas": {"a": S}}, {}, "dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, {}, "dependencies"),
    ({"propertyNames": {"maxLength": 3}}, {}, "propertyNames"),
    ({"unevaluatedProperties": False, "allOf": [{}]}, {"allOf": [{}]}, "unevaluatedProperties"),
    ({"unevaluatedItems": False, "allOf": [{}]}, {"allOf": [{}]}, "unevaluatedItems"),
    *(
        ({**S, "format": name}, S, "format")
        for name in ("uri-reference", "iri", "byte", "decimal", "regex")
    ),
]
# Values that it cannot compile.
UNCOMPILABLE = [
    ({**S, "pattern": "^(?!a)"}, S, "pattern"),
    ({**S, "pattern": r"(.)\1", "maxLength": 3}, {**S, "maxLength": 3}, "pattern"),
    ({"minimum": 1e19}, {}, "minimum"),
    ({**I, "multipleOf": 1e10, "minimum": 2}, {**I, "minimum": 2}, "multipleOf"),
    ({**ANY_TWO, "minProperties": 1}, ANY_TWO, "minProperties"),
    ({**ANY_TWO, "maxProperties": 1}, ANY_TWO, "maxProperties"),
    (
        {"patternProperties": {"^a": S, "b$": I}},
        {"patternProperties": {"^a": S}},
        "patternProperties/b$",
    ),
    (
        {"oneOf": [I, {"type": "number"}]},
        {"anyOf": [I, {"type": "number"}]},
        "oneOf",
    ),
]
ENFORCED = [
    {**I, "format": "int32"},
    {**S, "format": "date-time", "minLength": 1},
    {**S, "pattern": "^a+$", "maxLength": 3},
    {"oneOf": [S, I]},
    {"patternProperties": {"^a": S, "^b": I}},
    {"minProperties": 1},
]


def _clean(schema, *, probes_values=False):
    cleaner = SchemaCleaner(PROBE, probes_values=probes_values)
    cleaned = cleaner.clean(json.loads(json.dumps(schema)))
    return cleaned, cleaner


@pytest.mark.parametrize(("schema", "left", "place"), [*NEVER, *UNCOMPILABLE], ids=str)
def test_a_keyword_that_cannot_be_enforced_is_left_out_and_reported(schema, left, place):
    whole = {"properties": {"a": schema}}
    probes_values = (schema, left, place) in UNCOMPILABLE
    cleaned, cleaner = _clean(whole, probes_values=probes_values)
    assert cleaned == {"properties": {"a": left}}
    assert cleaner.ignored == (f"#/properties/a/{place}",)
    assert PROBE.compiles(cleaned)


@pytest.mark.parametrize(("schema", "left", "place"), [*NEVER, *UNCOMPILABLE], ids=str)
def test_a_strict_schema_is_refused_with_the_place_of_the_keyword(schema, left, place):
    cleaner = SchemaCleaner(PROBE, probes_values=True)
    with pytest.raises(ValueError, match="strict") as raised:
        cleaner.clean({"x-paxkv-strict": True, "items": json.loads(json.dumps(schema))})
    assert f"#/items/{place};" in str(raised.value) and cleaner.is_strict_refusal


@pytest.mark.parametrize("schema", ENFORCED, ids=str)
def test_what_llguidance_can_enforce_stays(schema):
    cleaned, cleaner = _clean({"x-paxkv-strict": True, "items": schema}, probes_values=True)
    assert cleaned == {"items": schema} and cleaner.ignored == ()


def test_names_of_a_removed_pattern_count_as_additional_properties():
    schema = {"patternProperties": {"^(?!a)": S}, "additionalProperties": False}
    cleaned, cleaner = _clean(schema, probes_values=True)
    assert cleaned == {"patternProperties": {}}
    assert cleaner.ignored == ("#/patternProperties/%5E(%3F!a)", "#/additionalProperties")


def test_alternatives_of_one_of_are_kept_only_if_they_exclude_each_other():
    apart, alike = [{**I}, {**S}], [{**I}, {"type": "number"}]
    schema = {"anyOf": [{"oneOf": apart}, {"oneOf": alike, "anyOf": [{}]}]}
    cleaned, cleaner = _clean(schema, probes_values=True)
    assert cleaned == {
        "anyOf": [{"oneOf": apart}, {"anyOf": [{}], "allOf": [{"anyOf": alike}]}],
    }
    assert cleaner.ignored == ("#/anyOf/1/oneOf",)


def test_a_pattern_that_lists_names_becomes_properties():
    closed = {"additionalProperties": False}
    names = {"patternProperties": {"^(x|y)$": I, "^z": S}}
    cleaned, cleaner = _clean({**names, **closed, "required": ["y", "x", "za"]})
    assert cleaned["properties"] == {"y": I, "x": I}
    assert cleaned["patternProperties"] == {"^z": S} and cleaner.ignored == ()
    own, _ = _clean({**names, **closed, "properties": {"x": {"minimum": 1}, "y": True}})
    assert own["properties"] == {"x": {"allOf": [{"minimum": 1}, I]}, "y": I}
    # One name is left, or others are offered too.
    for schema in ({**names, **closed, "required": ["x"]}, {**names, "required": ["x", "y"]}):
        assert "properties" not in _clean(schema)[0]


def test_a_keyword_is_ignored_in_one_tool_and_refused_in_a_strict_one():
    tools = [
        {"$id": f"tool:{name}", "properties": {"a": {"not": {"const": 1}}}, **strictness}
        for name, strictness in (("f", {}), ("g", {"x-paxkv-strict": True}))
    ]
    _, cleaner = _clean({"anyOf": tools[:1]})
    assert cleaner.ignored == ("tool:f#/properties/a/not",)
    with pytest.raises(SchemaError, match="at #/properties/a/not;") as raised:
        _clean({"anyOf": tools})
    assert raised.value.tool == "g"
