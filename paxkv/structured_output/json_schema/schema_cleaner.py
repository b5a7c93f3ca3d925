"""`SchemaCleaner`: removes the keywords of a JSON schema that llguidance cannot compile.

Clients rarely write their schemas themselves, because the schemas of tools come from other servers.
So a keyword that no grammar can enforce, such as `uniqueItems`, is removed and reported. Only in a
strict schema it is an error.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from paxkv.config.structured_outputs_params import STRICT_KEYWORD
from paxkv.structured_output.form_errors import SchemaError
from paxkv.structured_output.json_schema.endless_schemas import close_endless_schemas
from paxkv.structured_output.json_schema.idle_keywords import (
    drop_idle_keywords,
    is_trivial,
    types_of,
)
from paxkv.structured_output.json_schema.keyword_forms import shown, wrong_limit
from paxkv.structured_output.json_schema.schema_parts import SchemaPart, find_schema_parts

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords of JSON Schema that llguidance does not implement; `if` also stands for `then` and
# `else`, and `contains` for `minContains` and `maxContains`.
_NEVER_ENFORCED = (
    *("not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
)
_COMPANIONS = {"if": ("then", "else"), "contains": ("minContains", "maxContains")}
_KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Keywords that are tried with llguidance, by the type of value that they limit.
_NUMBER_LIMITS = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ARRAY_LIMITS = ("minItems", "maxItems")
_STRING_LIMITS = ("pattern", "format", "minLength", "maxLength")
_OBJECT_LIMITS = ("minProperties", "maxProperties")
# Each `oneOf` is tried with the whole schema. If there are more, all of them are read as `anyOf`.
_MAX_TRIED_ONE_OFS = 8


class SchemaProbe(Protocol):
    """Tries schemas. Implemented by `LlguidanceProbe`."""

    def compiles(self, schema: Mapping[str, object]) -> bool: ...

    def has_more_names(self, pattern: str, names: Sequence[str]) -> bool: ...

    def matches(self, pattern: str, text: str) -> bool: ...


class SchemaCleaner:
    """Cleans the schemas of one request.

    Args:
        probe: Tries parts of schemas.
        probes_values: Also removes keywords whose value llguidance cannot compile, such as a
            `pattern` with a look-ahead. This tries each keyword, so the caller asks for it only
            after the whole schema was refused.

    Attributes:
        num_schemas: Schemas that `clean` was called for.
        is_strict_refusal: Whether `clean` raised because of a strict schema.
    """

    def __init__(self, probe: SchemaProbe, *, probes_values: bool) -> None:
        self._probe = probe
        self._probes_values = probes_values
        self.num_schemas = 0
        self.is_strict_refusal = False
        self._ignored: dict[str, None] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """The places of keywords that the grammar does not enforce: "#/properties/a/not"."""
        return tuple(self._ignored)

    def clean(self, schema: object) -> object:
        """Returns the schema without keywords that cannot be compiled. May change it in place.

        Raises:
            SchemaError: A type or reference does not exist, or a strict schema has a keyword that
                cannot be enforced.
            ValueError: The whole schema refers to itself without end.
        """
        self.num_schemas += 1
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, dict):
            raise SchemaError(f"a schema is an object or a boolean, got {json.dumps(schema)[:80]}")
        for part in find_schema_parts(schema):
            drop_idle_keywords(part.schema)
            _check_names(part)
        # Strict parts first: a part that a strict and another schema share must be an error.
        for part in sorted(find_schema_parts(schema), key=lambda part: not part.is_strict):
            self._drop_never_enforced(part)
            if self._probes_values:
                self._drop_uncompilable(part)
            self._move_last_names(part)
        if self._probes_values:
            self._replace_one_ofs(schema)
        parts = find_schema_parts(schema)
        close_endless_schemas(parts)
        for part in parts:
            part.schema.pop(STRICT_KEYWORD, None)
        return schema

    def _drop(self, part: SchemaPart, *steps: str) -> None:
        """Removes a keyword, or an entry of it, and reports it.

        Raises:
            SchemaError: The schema is strict.
        """
        pointer = part.pointer_to(*steps)
        if part.is_strict:
            self.is_strict_refusal = True
            raise SchemaError(_strict_refusal(part, steps), tool=part.tool)
        self._ignored[pointer] = None
        *outer, last = steps
        holder = part.schema[outer[0]] if outer else part.schema
        del holder[last]

    def _drop_never_enforced(self, part: SchemaPart) -> None:
        for keyword in _NEVER_ENFORCED:
            if keyword in part.schema:
                self._drop(part, keyword)
                for companion in _COMPANIONS.get(keyword, ()):
                    part.schema.pop(companion, None)
        name = part.schema.get("format")
        if isinstance(name, str) and name not in _KNOWN_FORMATS:
            if "string" in types_of(part.schema):
                self._drop(part, "format")

    def _drop_uncompilable(self, part: SchemaPart) -> None:
        # llguidance reads the keywords of the types that a schema allows.
        types = types_of(part.schema)
        if types & {"number", "integer"}:
            number = "number" if "number" in types else "integer"
            self._drop_limits(part, {"type": number}, _NUMBER_LIMITS)
        if "string" in types:
            self._drop_limits(part, {"type": "string"}, _STRING_LIMITS)
        if "array" in types:
            self._drop_limits(part, {"type": "array"}, _ARRAY_LIMITS)
        if "object" in types:
            self._drop_patterns(part)
            self._drop_limits(part, _without_values(part.schema), _OBJECT_LIMITS)

    def _drop_limits(
        self, part: SchemaPart, kept: Mapping[str, object], keywords: tuple[str, ...]
    ) -> None:
        """Drops `keywords` that do not compile together with `kept` and with earlier keywords."""
        if not any(keyword in part.schema for keyword in keywords):
            return
        tried = dict(kept)
        for keyword in keywords:
            if keyword not in part.schema:
                continue
            with_it = tried | {keyword: part.schema[keyword]}
            if self._probe.compiles(with_it):
                tried = with_it
            else:
                self._drop(part, keyword)

    def _drop_patterns(self, part: SchemaPart) -> None:
        """Drops patterns of names that do not compile together with earlier ones.

        Names of a dropped pattern would count as additional properties, so `additionalProperties`
        is dropped too.
        """
        patterns = part.schema.get("patternProperties")
        if not isinstance(patterns, dict):
            return
        kept: dict[str, object] = {}
        for pattern in list(patterns):
            tried = kept | {pattern: True}
            if self._probe.compiles({"type": "object", "patternProperties": tried}):
                kept = tried
            else:
                self._drop(part, "patternProperties", pattern)
                if "additionalProperties" in part.schema:
                    self._drop(part, "additionalProperties")

    def _move_last_names(self, part: SchemaPart) -> None:
        """Writes a pattern as properties if all its names are in `required` or `properties`.

        After these names, llguidance would try to generate another name of the pattern, and fail.
        For example, "^x$" has no other name if "x" is required.
        """
        patterns, required = part.schema.get("patternProperties"), part.schema.get("required")
        properties = part.schema.get("properties", {})
        if not isinstance(patterns, dict) or not isinstance(properties, dict):
            return
        names = [*properties, *(required if isinstance(required, list) else ())]
        names = list(dict.fromkeys(name for name in names if isinstance(name, str)))
        # If additional properties are allowed, there is always another name.
        if not names or is_trivial(part.schema.get("additionalProperties", True)):
            return
        for pattern in list(patterns):
            if self._probe.has_more_names(pattern, names):
                continue
            schema = patterns.pop(pattern)
            for name in names:
                if self._probe.matches(pattern, name):
                    own = properties.get(name, True)
                    properties[name] = schema if own is True else {"allOf": [own, schema]}
            part.schema["properties"] = properties

    def _replace_one_ofs(self, schema: dict[str, object]) -> None:
        """Reads a `oneOf` as `anyOf` if llguidance cannot tell its alternatives apart."""
        parts = [part for part in find_schema_parts(schema) if "oneOf" in part.schema]
        if not parts or self._probe.compiles(schema):
            return
        originals = [dict(part.schema) for part in parts]
        for part in parts:
            _write_as_any_of(part.schema)
        for part, original in zip(parts, originals, strict=True):
            replaced = dict(part.schema)
            if len(parts) <= _MAX_TRIED_ONE_OFS:
                _replace(part.schema, original)
                if self._probe.compiles(schema):
                    continue
            _replace(part.schema, original)
            self._drop(part, "oneOf")
            _replace(part.schema, replaced)


def _strict_refusal(part: SchemaPart, steps: Sequence[str]) -> str:
    wrong = wrong_limit(part, steps[0])
    if wrong is not None:
        return f"{wrong}; correct it, or send strict: false to have it ignored"
    value = "" if len(steps) > 1 else f": {shown(part.schema[steps[0]])}"
    return (
        f'the schema is strict, and no grammar can enforce "{steps[0]}"{value} at '
        f"{part.place_of(*steps)}; remove the keyword, or send strict: false to have it ignored"
    )


def _check_names(part: SchemaPart) -> None:
    """Checks types and references, because llguidance's errors do not say where they are.

    Raises:
        SchemaError: A type or reference does not exist.
    """
    unknown = [name for name in types_of(part.schema) if name not in _TYPES]
    if unknown:
        raise SchemaError(
            f'"type" at {part.place} is "{unknown[0]:.80}"; it may be {", ".join(_TYPES)}, or a '
            "list of these",
            tool=part.tool,
        )
    ref = part.schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#") and part.target is None:
        raise SchemaError(
            f'"$ref" at {part.place} is "{ref:.80}", which the schema does not have; correct the '
            "reference, or add the definition",
            tool=part.tool,
        )


def _write_as_any_of(schema: dict[str, object]) -> None:
    alternatives = {"anyOf": schema.pop("oneOf")}
    if "anyOf" in schema:
        all_of = schema.get("allOf")
        alternatives = {"allOf": [*(all_of if isinstance(all_of, list) else ()), alternatives]}
    schema |= alternatives


def _replace(schema: dict[str, object], content: Mapping[str, object]) -> None:
    """Replaces the content of a schema, which stays the same object."""
    schema.clear()
    schema.update(content)


def _without_values(schema: Mapping[str, object]) -> dict[str, object]:
    """A schema with the names of an object's properties, but with any values."""
    kept: dict[str, object] = {"type": "object"}
    for keyword in ("properties", "patternProperties"):
        if isinstance(schema.get(keyword), dict):
            kept[keyword] = dict.fromkeys(schema[keyword], True)
    if "required" in schema:
        kept["required"] = schema["required"]
    if schema.get("additionalProperties") is False:
        kept["additionalProperties"] = False
    return kept
