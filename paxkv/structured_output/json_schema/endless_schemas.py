"""`close_endless_schemas`: finds schemas that refer to themselves without end.

No finite value fits {"$ref": "#"}. llguidance compiles such a schema, but fails when an answer
reaches it. So it is replaced here by a schema that no value fits.
"""

from collections.abc import Callable, Mapping

from paxkv.structured_output.form_errors import SchemaError
from paxkv.structured_output.json_schema.idle_keywords import types_of
from paxkv.structured_output.json_schema.schema_parts import SchemaPart

# Maximum number of places that an error names.
_MAX_PLACES = 3


def close_endless_schemas(parts: list[SchemaPart]) -> None:
    """Makes endless schemas impossible, in place.

    Args:
        parts: All parts of a schema, the whole schema first.

    Raises:
        SchemaError: The whole schema is endless.
    """
    targets = {id(part.schema): part.target for part in parts}
    # A least fixed point: a schema is finite once everything that it needs is.
    finite: set[int] = set()
    waiting = [part for part in parts if id(part.schema) not in finite]
    has_changed = True
    while has_changed:
        found = [p for p in waiting if _is_finite(p.schema, targets, finite)]
        finite.update(id(part.schema) for part in found)
        waiting = [part for part in waiting if id(part.schema) not in finite]
        has_changed = bool(found)
    if not waiting:
        return
    if id(parts[0].schema) not in finite:
        found = [part for part in waiting if "$ref" in part.schema]
        found = [part for part in found if part.tool == found[0].tool]
        shown = " and at ".join(part.place for part in found[:_MAX_PLACES])
        raise SchemaError(
            f'no value fits the schema: "$ref" at {shown} leads '
            "back to itself without end; make one of the properties on the way optional, or allow "
            "another value",
            tool=found[0].tool if found else None,
        )
    for part in waiting:
        part.schema.clear()
        part.schema["enum"] = []


def _is_finite(
    schema: Mapping[str, object], targets: Mapping[int, object], finite: set[int]
) -> bool:
    """Whether a finite value fits a schema, given the schemas that are known to be finite."""

    def is_known(inner: object) -> bool:
        return not isinstance(inner, dict) or id(inner) in finite

    if "$ref" in schema and not is_known(targets[id(schema)]):
        return False
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and not all(map(is_known, all_of)):
        return False
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and options and not any(map(is_known, options)):
            return False
    types = types_of(schema)
    if types == {"object"}:
        required, properties = schema.get("required"), schema.get("properties")
        if not isinstance(required, list) or not isinstance(properties, dict):
            return True
        return all(is_known(properties.get(name)) for name in required if isinstance(name, str))
    if types == {"array"}:
        return _is_finite_array(schema, is_known)
    return True


def _is_finite_array(schema: Mapping[str, object], is_known: Callable[[object], bool]) -> bool:
    least = schema.get("minItems")
    if type(least) is not int or least < 1:
        return True
    items, first = schema.get("items"), schema.get("prefixItems")
    if isinstance(items, list):
        items, first = schema.get("additionalItems"), items
    first = first if isinstance(first, list) else []
    return all(map(is_known, first[:least])) and (least <= len(first) or is_known(items))
