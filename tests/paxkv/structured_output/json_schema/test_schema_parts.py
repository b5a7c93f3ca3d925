"""All subschemas that a grammar is made from are found, with the places that clients know."""

from paxkv.structured_output.json_schema.schema_parts import find_schema_parts


def _pointers(schema):
    return [part.pointer for part in find_schema_parts(schema)]


def test_parts_are_found_in_order_with_their_places():
    schema = {
        "properties": {"a/b": {"items": [{}, {"const": {"items": {}}}]}, "é, ": True},
        "allOf": [{"additionalProperties": {}}],
        "not": {"items": {}},
        "x-more": {"items": {}},
    }
    assert _pointers(schema) == [
        "#",
        "#/properties/a~1b",
        "#/properties/a~1b/items/0",
        "#/properties/a~1b/items/1",
        "#/allOf/0",
        "#/allOf/0/additionalProperties",
    ]
    (part, *_) = find_schema_parts(schema)
    assert part.pointer_to("patternProperties", "é, ") == "#/patternProperties/%C3%A9%2C%20"


def test_definitions_are_found_if_a_reference_names_them():
    schema = {
        "items": {"$ref": "#/$defs/a%20b/x"},
        "$defs": {"a b": {"x": {"items": {"$ref": "#here"}}}, "unused": {}},
        "components": {"y": {"$anchor": "here", "items": {"$ref": "#"}}},
    }
    parts = find_schema_parts(schema)
    assert [part.pointer for part in parts] == [
        "#",
        "#/items",
        "#/$defs/a%20b/x",
        "#/$defs/a%20b/x/items",
        "#/components/y",
        "#/components/y/items",
    ]
    assert parts[1].target is schema["$defs"]["a b"]["x"] and parts[-1].target is schema


def test_references_of_a_tool_count_from_its_own_schema():
    definitions = [{"V": {"const": 1}}, {"V": {"const": 2}}]
    schemas = [
        {"$id": f"tool:f{k}", "items": {"$ref": "#/$defs/V"}, "$defs": own}
        for k, own in enumerate(definitions)
    ]
    parts = find_schema_parts({"anyOf": schemas})
    assert [(part.pointer, part.schema.get("const")) for part in parts] == [
        ("#", None),
        ("tool:f0#", None),
        ("tool:f0#/items", None),
        ("tool:f0#/$defs/V", 1),
        ("tool:f1#", None),
        ("tool:f1#/items", None),
        ("tool:f1#/$defs/V", 2),
    ]


def test_dynamic_references_become_plain_ones():
    schema = {
        "$recursiveAnchor": True,
        "items": {"$recursiveRef": "#"},
        "additionalProperties": {"$dynamicRef": "#leaf"},
        "$defs": {"leaf": {"$dynamicAnchor": "leaf"}},
    }
    parts = find_schema_parts(schema)
    assert schema == {
        "items": {"$ref": "#"},
        "additionalProperties": {"$ref": "#leaf"},
        "$defs": {"leaf": {"$anchor": "leaf"}},
    }
    assert [part.pointer for part in parts][-1] == "#/$defs/leaf"


def test_strictness_holds_for_what_a_schema_refers_to():
    schema = {
        "anyOf": [{"x-paxkv-strict": True, "items": {"$ref": "#/$defs/a"}}, {"$ref": "#/$defs/a"}],
        "$defs": {"a": {}},
    }
    strictness = [(part.pointer, part.is_strict) for part in find_schema_parts(schema)]
    assert strictness == [
        ("#", False),
        ("#/anyOf/0", True),
        ("#/anyOf/0/items", True),
        ("#/$defs/a", True),
        ("#/anyOf/1", False),
        ("#/$defs/a", False),
    ]


def test_a_reference_to_another_document_has_no_target():
    refs = ["other.json", "#/nowhere", "#nowhere", 5]
    parts = find_schema_parts({"anyOf": [{"$ref": ref} for ref in refs]})
    assert [part.target for part in parts] == [None] * 5
