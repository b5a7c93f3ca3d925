"""Keywords that exclude no value are removed or rewritten; all others stay as they are."""

import math

import pytest

from paxkv.structured_output.json_schema.idle_keywords import drop_idle_keywords

S = {"type": "string"}
LARGEST = 2**63 - 1024  # the float64 next to 2**63
# What a schema becomes.
IDLE = [
    ({"uniqueItems": False}, {}),
    ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    ({"propertyNames": {}}, {}),
    ({"propertyNames": True}, {}),
    ({"propertyNames": {"type": "string", "description": "a name"}}, {}),
    ({"if": S}, {}),
    ({"if": S, "then": {}, "else": True}, {}),
    ({"then": S, "else": S}, {}),
    ({"minContains": 2, "maxContains": 3}, {}),
    ({"contains": S, "minContains": 0}, {}),
    ({"not": False}, {}),
    ({"dependentRequired": {"a": []}}, {}),
    ({"dependentSchemas": {"a": {}}}, {}),
    ({"dependencies": {}}, {}),
    ({"unevaluatedProperties": {}}, {}),
    ({"unevaluatedProperties": False, "additionalProperties": S}, {"additionalProperties": S}),
    ({"unevaluatedItems": True}, {}),
    ({"required": None, "items": None, "minimum": None}, {}),
    ({"required": True}, {}),
    ({"minLength": 0, "maxLength": 2**31, "maxItems": 3.0}, {"maxItems": 3}),
    ({"minProperties": 1, "required": ["a"]}, {"required": ["a"]}),
    (
        {"maxProperties": 1, "properties": {"a": S}, "additionalProperties": False},
        {"properties": {"a": S}, "additionalProperties": False},
    ),
    ({"minimum": -(2**63), "maximum": 1.8e308}, {}),
    ({"minimum": -math.inf, "exclusiveMaximum": 10**400}, {}),
    (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST},
    ),
    ({"type": "integer", "maximum": 2**64 - 1, "multipleOf": 1}, {"type": "integer"}),
    ({"minimum": 5e-324}, {"exclusiveMinimum": 0}),
    ({"minimum": -5e-324}, {"minimum": 0}),
    ({"exclusiveMinimum": -5e-324}, {"exclusiveMinimum": 0}),
    ({"maximum": 5e-324}, {"maximum": 0}),
    ({"$schema": "https://example.com/mine", "$id": "no uri %"}, {}),
    (
        {"$schema": "https://json-schema.org/draft-07/schema"},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
    ),
]
EQUIVALENT = [
    ({"unevaluatedProperties": S}, {"additionalProperties": S}),
    ({"unevaluatedItems": False}, {"items": False}),
    ({"type": "string", "not": {}}, {"type": "string", "enum": []}),
    ({"type": ["string", "null"], "not": {"type": "null"}}, {"type": ["string"]}),
    ({"not": {"type": "number"}}, {"type": ["null", "boolean", "string", "array", "object"]}),
    ({"type": "null", "not": {"type": "null"}}, {"type": "null", "enum": []}),
    (
        {"propertyNames": {"enum": ["a.b", "c"]}, "additionalProperties": S},
        {"patternProperties": {"^(?:a\\.b|c)$": S}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"type": "string", "pattern": "^x"}},
        {"patternProperties": {"^x": True}, "additionalProperties": False},
    ),
]
MEANINGFUL = [
    {"const": None, "default": None},
    {"uniqueItems": True},
    {"propertyNames": {"minLength": 1}},
    {"propertyNames": {"pattern": "^x"}, "properties": {"xa": S}},
    {"if": S, "then": {"minLength": 1}},
    {"contains": S},
    {"contains": S, "minContains": 0, "maxContains": 1},
    {"not": {"type": "string", "minLength": 1}},
    {"not": {"type": "integer"}, "type": "number", "minimum": 1},
    {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False, "allOf": [{}]},
    {"minProperties": 2, "required": ["a"]},
    {"minimum": 1e19},
    {"minimum": -9e18, "maximum": 2**53},
    {"exclusiveMinimum": True, "minimum": 1},
    {"type": "number", "multipleOf": 1},
]


@pytest.mark.parametrize(("schema", "left"), [*IDLE, *EQUIVALENT], ids=str)
def test_keywords_that_exclude_nothing_are_removed(schema, left):
    schema = dict(schema)
    drop_idle_keywords(schema)
    assert schema == left


@pytest.mark.parametrize("schema", MEANINGFUL, ids=str)
def test_keywords_that_exclude_values_stay(schema):
    cleaned = dict(schema)
    drop_idle_keywords(cleaned)
    assert cleaned == schema
