"""Schemas that lead back to themselves without end are made impossible, or refused."""

import pytest

from paxkv.structured_output.json_schema.endless_schemas import close_endless_schemas
from paxkv.structured_output.json_schema.schema_parts import find_schema_parts


def _object(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


NODE = {"$ref": "#/$defs/node"}
ENDLESS = {
    "itself": {"$ref": "#"},
    "through another": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}},
    "all of": {"allOf": [{}, {"$ref": "#"}]},
    "a required property": {**NODE, "$defs": {"node": _object(next=NODE)}},
    "items": {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    "first items": {"type": "array", "minItems": 1, "items": [{"$ref": "#"}]},
    "behind another property": _object(a={"type": "integer"}, b={"$ref": "#"}),
}
FINITE = {
    "an optional property": {"type": "object", "properties": {"next": {"$ref": "#"}}},
    "another value": _object(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "another type": {"type": ["object", "null"], **_object(next={"$ref": "#"})} | {"type": "null"},
    "no type": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "no items": {"type": "array", "items": {"$ref": "#"}},
    "another document": {"$ref": "https://example.com/a"},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_schema_is_refused_with_the_place_of_its_reference(name):
    with pytest.raises(ValueError, match=r'"\$ref" at #.* leads back to itself'):
        close_endless_schemas(find_schema_parts(ENDLESS[name]))


@pytest.mark.parametrize("name", FINITE)
def test_a_schema_with_an_end_stays_as_it_is(name):
    parts = find_schema_parts(FINITE[name])
    before = [dict(part.schema) for part in parts]
    close_endless_schemas(parts)
    assert [part.schema for part in parts] == before


def test_an_endless_part_of_a_schema_becomes_impossible():
    schema = {
        "properties": {"a": {"$ref": "#/$defs/a"}, "b": {}},
        "$defs": {"a": {"$ref": "#/$defs/a"}},
    }
    close_endless_schemas(find_schema_parts(schema))
    assert schema["properties"] == {"a": {"enum": []}, "b": {}}
