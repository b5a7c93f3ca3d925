"""`find_fault`: where in a JSON schema that llguidance refuses the mistake is.

llguidance says "properties must be an object", but not where. These searches run only after it has
refused a schema, so they cost nothing for the others, and refuse nothing by themselves.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from paxkv.structured_output.form_errors import SchemaError
from paxkv.structured_output.json_schema.schema_parts import SchemaPart, find_schema_parts
from paxkv.structured_output.json_schema.schema_probe import LlguidanceProbe

_SCHEMA = "an object or a boolean"
_NAMED_SCHEMAS = "an object whose values are schemas"
_SCHEMA_LIST = "a list of schemas"
_COUNT = "a whole number from 0 on"
# Keyword -> what its value must be.
_FORMS = {
    "properties": _NAMED_SCHEMAS,
    "patternProperties": _NAMED_SCHEMAS,
    "allOf": _SCHEMA_LIST,
    "anyOf": _SCHEMA_LIST,
    "oneOf": _SCHEMA_LIST,
    "prefixItems": _SCHEMA_LIST,
    "additionalProperties": _SCHEMA,
    "items": _SCHEMA,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "required": "a list of strings",
    "enum": "a list of values",
    "type": "a string or a list of strings",
    "$ref": "a string",
}
# Keywords whose value null does not stand for their absence.
_NULL_IS_A_VALUE = ("enum",)
# Schemas that are tried, to find the one that no value fits.
_MAX_TRIED = 32
_SHOWN_CHARS = 100
_REFERENCED = re.compile(r"while processing (?:json-schema:///)?(\S+#\S*|#\S*)")


def find_fault(schema: object, probe: LlguidanceProbe) -> SchemaError | None:
    """The first mistake in a schema; None if it is not of a kind that is looked for.

    Args:
        schema: As it was sent; references in it may be rewritten.
    """
    parts = find_schema_parts(schema)
    for part in parts:
        reason = _wrong_form(part)
        if reason is not None:
            return SchemaError(reason, tool=part.tool)
    return _find_impossible(schema, parts, probe) if isinstance(schema, dict) else None


def _wrong_form(part: SchemaPart) -> str | None:
    """The keyword of one schema whose value has the wrong type, or that llguidance cannot reach."""
    for keyword, value in part.schema.items():
        form = _FORMS.get(keyword)
        if form is None or (value is None and keyword not in _NULL_IS_A_VALUE):
            continue
        steps = next(_wrong_steps(keyword, form, value), None)
        if steps is None:
            continue
        for step in steps:
            value = value[step]
        wanted = f'a schema in "{keyword}" must be {_SCHEMA}' if steps else f"it must be {form}"
        if steps and form == "a list of strings":
            wanted = f'an entry of "{keyword}" must be a string'
        return f"{part.place_of(keyword, *steps)} is {_shown(value)}; {wanted}"
    ref = part.schema.get("$ref")
    if isinstance(ref, str) and not ref.startswith("#") and part.target is None:
        return (
            f'"$ref" at {part.place} is {_shown(ref)}, which is another document; paxkv does not '
            "fetch it: put its schema into $defs"
        )
    return None


def _wrong_steps(keyword: str, form: str, value: object) -> Iterator[tuple[object, ...]]:
    """Paths below a keyword to what has the wrong type; () is the value of the keyword itself."""
    if form == _SCHEMA:
        # Up to draft 2019-09, "items" may be a list of schemas.
        if keyword == "items" and isinstance(value, list):
            yield from ((k,) for k, inner in enumerate(value) if not _is_schema(inner))
        elif not _is_schema(value):
            yield ()
    elif form == _NAMED_SCHEMAS:
        if not isinstance(value, dict):
            yield ()
        else:
            yield from ((name,) for name, inner in value.items() if not _is_schema(inner))
    elif form == _SCHEMA_LIST:
        if not isinstance(value, list):
            yield ()
        else:
            yield from ((k,) for k, inner in enumerate(value) if not _is_schema(inner))
    elif form == "a list of strings":
        if not isinstance(value, list):
            yield ()
        else:
            yield from ((k,) for k, inner in enumerate(value) if not isinstance(inner, str))
    else:
        is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
        is_right = {
            "minItems": is_whole and value >= 0,
            "maxItems": is_whole and value >= 0,
            "enum": isinstance(value, list),
            "$ref": isinstance(value, str),
            "type": isinstance(value, str)
            or (isinstance(value, list) and all(isinstance(name, str) for name in value)),
        }
        if not is_right[keyword]:
            yield ()


def _is_schema(value: object) -> bool:
    return isinstance(value, (dict, bool))


def _find_impossible(
    schema: Mapping[str, object], parts: Sequence[SchemaPart], probe: LlguidanceProbe
) -> SchemaError | None:
    """The innermost schema that no value fits, and that every value of the outer ones needs."""
    error = probe.error_of(schema)
    if not probe.is_about_values(error):
        return None
    by_id = {id(part.schema): part for part in parts}
    roots = {part.tool: part.schema for part in reversed(parts) if part.place == "#"}
    found = _referenced(error, parts) or parts[0]
    seen = {id(found.schema)}
    waiting = list(_needed(found))
    for _ in range(_MAX_TRIED):
        inner = by_id.get(id(waiting.pop(0))) if waiting else None
        if inner is not None and id(inner.schema) not in seen:
            seen.add(id(inner.schema))
            definitions = {
                name: roots[inner.tool][name]
                for name in ("$defs", "definitions")
                if name in roots[inner.tool]
            }
            if probe.is_about_values(probe.error_of(definitions | inner.schema)):
                # What it needs is looked at next, and nothing beside it.
                found, waiting = inner, list(_needed(inner))
    return SchemaError(
        f"no value fits the schema at {found.place}, which is {_shown(found.schema)}; correct "
        "keywords that exclude each other, or remove one",
        tool=found.tool,
    )


def _referenced(error: str, parts: Sequence[SchemaPart]) -> SchemaPart | None:
    """The schema that llguidance was at when it failed; it names those alone that a `$ref` names.

    "... while processing json-schema:///#/$defs/d" -> the part at "#/$defs/d".
    """
    match = _REFERENCED.search(error)
    return next((part for part in parts if match and part.pointer == match[1]), None)


def _needed(part: SchemaPart) -> Iterator[object]:
    """The schemas right below a schema that something must fit, whatever the value is."""
    schema = part.schema
    if part.target is not None:
        yield part.target
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        yield from (properties[name] for name in required if name in properties)
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword)
        if isinstance(choices, list) and len(choices) == 1:
            yield from choices
    if isinstance(schema.get("allOf"), list):
        yield from schema["allOf"]
    min_items = schema.get("minItems")
    if isinstance(min_items, int) and min_items > 0:
        prefix = schema.get("prefixItems")
        prefix = prefix if isinstance(prefix, list) else []
        yield from prefix[:min_items]
        if min_items > len(prefix):
            yield schema.get("items")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
