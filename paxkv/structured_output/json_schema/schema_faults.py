"""`find_fault`: finds the mistake in a JSON schema that llguidance has refused.

llguidance says "properties must be an object", but not where. These searches run only after it has
refused a schema, so they neither delay nor refuse other schemas.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from paxkv.structured_output.form_errors import SchemaError
from paxkv.structured_output.json_schema.keyword_forms import shown, wrong_form
from paxkv.structured_output.json_schema.schema_cleaner import SchemaCleaner
from paxkv.structured_output.json_schema.schema_parts import SchemaPart, find_schema_parts
from paxkv.structured_output.json_schema.schema_probe import LlguidanceProbe
from paxkv.structured_output.json_schema.unwritable_values import find_unwritable

# The keyword for llguidance's options, which it reads only at the top of a schema.
_OPTIONS = "x-guidance"
# Maximum number of schemas that are tried to find the one that no value fits.
_MAX_TRIED = 32
_REFERENCED = re.compile(r"while processing (?:json-schema:///)?(\S+#\S*|#\S*)")


def find_fault(schema: object, probe: LlguidanceProbe) -> SchemaError | None:
    """The first mistake in a schema; None if no search finds it.

    Args:
        schema: As it was sent; it may be changed in place.
    """
    if schema is False:
        return SchemaError("no value fits the schema, which is false; send one that allows a value")
    reason = find_unwritable(schema)
    if reason is not None:
        return SchemaError(reason)
    parts = find_schema_parts(schema)
    for part in parts:
        reason = wrong_form(part) or _unreachable(part)
        if reason is not None:
            return SchemaError(reason, tool=part.tool)
    if not isinstance(schema, dict):
        return None
    return _wrong_options(schema, probe) or _find_impossible(schema, parts, probe)


def _unreachable(part: SchemaPart) -> str | None:
    ref = part.schema.get("$ref")
    if not isinstance(ref, str) or ref.startswith("#") or part.target is not None:
        return None
    return (
        f'"$ref" at {part.place} is {shown(ref)}, which is another document; paxkv does not '
        "fetch it: put its schema into $defs"
    )


def _wrong_options(schema: Mapping[str, object], probe: LlguidanceProbe) -> SchemaError | None:
    """An error if llguidance refuses the options at the top of the schema."""
    if _OPTIONS not in schema:
        return None
    error = probe.error_of({_OPTIONS: schema[_OPTIONS]})
    if not error:
        return None
    return SchemaError(f"#/{_OPTIONS} is {shown(schema[_OPTIONS])}: {error}; correct or remove it")


def _find_impossible(
    schema: Mapping[str, object], parts: Sequence[SchemaPart], probe: LlguidanceProbe
) -> SchemaError | None:
    """Finds the innermost required schema that no value fits."""
    # The schemas as they were sent. Before the trials, keywords are removed from them.
    sent = {id(part.schema): shown(part.schema) for part in parts}
    SchemaCleaner(probe, probes_values=True).clean(schema)
    parts = find_schema_parts(schema)
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
                # From now on, only schemas that this one needs are tried.
                found, waiting = inner, list(_needed(inner))
    return SchemaError(
        f"no value fits the schema at {found.place}, which is "
        f"{sent.get(id(found.schema)) or shown(found.schema)}; correct or remove keywords that "
        "exclude every value",
        tool=found.tool,
    )


def _referenced(error: str, parts: Sequence[SchemaPart]) -> SchemaPart | None:
    """The schema in which llguidance failed. Its error names only schemas that a `$ref` names.

    "... while processing json-schema:///#/$defs/d" -> the part at "#/$defs/d".
    """
    match = _REFERENCED.search(error)
    return next((part for part in parts if match and part.pointer == match[1]), None)


def _needed(part: SchemaPart) -> Iterator[object]:
    """The schemas directly inside a schema that every value, or a part of it, must fit."""
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
