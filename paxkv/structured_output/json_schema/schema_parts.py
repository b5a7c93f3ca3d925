"""`find_schema_parts`: the subschemas of a JSON schema that a grammar is made from.

Definitions that no `$ref` reaches are left out, and so are the subschemas of keywords that no
grammar can enforce (`not`, `if`, `contains` and so on).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from urllib.parse import quote, unquote

from paxkv.config.structured_outputs_params import STRICT_KEYWORD, TOOL_ID_PREFIX

_ONE_SCHEMA = ("additionalProperties", "additionalItems", "items")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS_BY_NAME = ("properties", "patternProperties")
# Keywords that, in a schema of one document, mean the same as `$ref`.
_DYNAMIC_REFS = ("$dynamicRef", "$recursiveRef")


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaPart:
    """A subschema and its place.

    Args:
        schema: May be changed in place.
        pointer: The place, as a URI fragment: "#/properties/a". In a list of calls it begins with
            the name of the tool: "tool:f#/properties/a".
        is_strict: Whether every keyword must be enforced.
        target: The schema that its `$ref` names; None without one, or if it is not in the document.
    """

    schema: dict[str, object]
    pointer: str
    is_strict: bool
    target: object | None

    @property
    def tool(self) -> str | None:
        """The tool that the schema belongs to, in the schema of a list of calls."""
        resource = self.pointer.partition("#")[0]
        return resource.removeprefix(TOOL_ID_PREFIX) if resource else None

    @property
    def place(self) -> str:
        """The pointer without the name of the tool: "#/properties/a"."""
        return self.place_of()

    def place_of(self, *steps: object) -> str:
        """Like `pointer_to`, but without the name of the tool."""
        return f"#{self.pointer_to(*steps).partition('#')[2]}"

    def pointer_to(self, *steps: object) -> str:
        """The place of a keyword, or of a value in it: ("enum", 0) -> "#/properties/a/enum/0"."""
        return self.pointer + "".join(f"/{escape_step(str(step))}" for step in steps)


@dataclasses.dataclass(frozen=True, slots=True)
class _Resource:
    """The schema with the nearest `$id`. References within it start at this schema."""

    root: object
    pointer: str


def find_schema_parts(root: object) -> list[SchemaPart]:
    """All parts that `root` reaches, `root` first.

    A part that both a strict and another schema reach is listed twice. Dynamic references are
    replaced by plain ones, in place.
    """
    found: list[SchemaPart] = []
    seen: set[tuple[int, bool]] = set()
    # (schema, its resource, its pointer, whether it is inside a strict schema)
    waiting = [(root, _Resource(root, "#"), "#", False)]
    while waiting:
        schema, resource, pointer, is_strict = waiting.pop()
        if not isinstance(schema, dict):
            continue
        is_strict = is_strict or schema.get(STRICT_KEYWORD) is True
        if (id(schema), is_strict) in seen:
            continue
        seen.add((id(schema), is_strict))
        resource, pointer = _enter(schema, resource, pointer)
        _replace_dynamic_refs(schema)
        target = _resolve(schema.get("$ref"), resource)
        part = SchemaPart(schema, pointer, is_strict, None if target is None else target[0])
        found.append(part)
        inner = [
            (value, resource, part.pointer_to(*steps), is_strict)
            for *steps, value in _subschemas(schema)
        ]
        if target is not None:
            inner.append((*target, is_strict))
        # `pop` takes the last item, so the order is reversed.
        waiting += reversed(inner)
    return found


def _subschemas(schema: Mapping[str, object]) -> Iterator[tuple[object, ...]]:
    """The schemas directly inside a schema, with their places: ("properties", "a", {...})."""
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from ((keyword, name, inner) for name, inner in value.items())
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            yield from ((keyword, idx, inner) for idx, inner in enumerate(value))
        elif keyword in _ONE_SCHEMA:
            yield keyword, value


def _enter(
    schema: Mapping[str, object], resource: _Resource, pointer: str
) -> tuple[_Resource, str]:
    """The resource and the pointer of a schema. A schema with an `$id` is a new resource."""
    schema_id = schema.get("$id")
    if not isinstance(schema_id, str) or schema_id.startswith("#"):
        return resource, pointer
    if schema_id.startswith(TOOL_ID_PREFIX):
        pointer = f"{schema_id}#"
    return _Resource(schema, pointer), pointer


def _replace_dynamic_refs(schema: dict[str, object]) -> None:
    for keyword in _DYNAMIC_REFS:
        if keyword in schema and "$ref" not in schema:
            schema["$ref"] = schema.pop(keyword)
    schema.pop("$recursiveAnchor", None)
    if isinstance(schema.get("$dynamicAnchor"), str):
        schema.setdefault("$anchor", schema.pop("$dynamicAnchor"))


def _resolve(ref: object, resource: _Resource) -> tuple[object, _Resource, str] | None:
    """The schema that a reference names, its resource and its pointer; None if not found."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    if ref != "#" and not ref.startswith("#/"):
        return _find_anchor(ref[1:], resource)
    found, pointer, inner = resource.root, resource.pointer, resource
    for escaped in ref.split("/")[1:]:
        step = unquote(escaped).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
        pointer += f"/{escape_step(step)}"
        if isinstance(found, dict):
            inner, pointer = _enter(found, inner, pointer)
    return found, inner, pointer


def _find_anchor(name: str, resource: _Resource) -> tuple[object, _Resource, str] | None:
    waiting = [(resource.root, resource.pointer)]
    while waiting:
        value, pointer = waiting.pop()
        if isinstance(value, dict):
            # Until draft 7, an anchor is an `$id` or, in draft 4, an `id`.
            own = [value.get(key) for key in ("$anchor", "$dynamicAnchor", "$id", "id")]
            if name in own or f"#{name}" in own:
                return value, resource, pointer
            waiting += [(inner, f"{pointer}/{escape_step(key)}") for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(inner, f"{pointer}/{idx}") for idx, inner in enumerate(value)]
    return None


def escape_step(step: str) -> str:
    """A step of a JSON pointer in a URI, which is ASCII without spaces and commas."""
    return quote(step.replace("~", "~0").replace("/", "~1"), safe="$:@!'()*+;=&~")
