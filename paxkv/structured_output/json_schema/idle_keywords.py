"""`drop_idle_keywords`: removes keywords of a JSON schema that exclude no value.

llguidance refuses keywords that it does not implement, even if they exclude no value. It also
refuses values that JSON Schema allows, such as `"maxLength": 100.0`, and bounds beyond 64 bits.
Here such keywords are removed or rewritten. The same values fit the schema as before.
"""

import math
import re
from collections.abc import Mapping

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_ANNOTATIONS = frozenset(
    {"$comment", "title", "description", "default", "examples", "deprecated", "readOnly"}
    | {"writeOnly", "$schema", "$id", "$anchor", "$defs", "definitions"}
)
# Keywords whose value may be null.
_VALUES = ("const", "default", "examples", "enum")
_COUNTS = ("Length", "Items", "Properties", "Contains")
# Longer than any answer.
_MAX_COUNT = 2**31
_INT64_END = 2.0**63
# The float64 next to 2**63, towards 0.
_LAST_INT64 = 2**63 - 1024
# llguidance writes a small bound as a regular expression with a group for each zero.
_SMALLEST_BOUND = 1e-30
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")
_KNOWN_DRAFT = re.compile(
    r"https?://json-schema\.org/(draft-0[3467]|draft/20(?:19-09|20-12))/schema#?"
)
_URI = re.compile(r"(?:[\w.~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", re.ASCII)


def drop_idle_keywords(schema: dict[str, object]) -> None:
    """Changes one schema in place, without the schemas inside it."""
    for keyword in [k for k, value in schema.items() if value is None and k not in _VALUES]:
        del schema[keyword]
    _drop_unknown_names(schema)
    _correct_counts(schema)
    _correct_bounds(schema)
    _simplify_conditions(schema)
    _simplify_not(schema)
    _simplify_arrays(schema)
    _simplify_objects(schema)


def types_of(schema: Mapping[str, object]) -> frozenset[object]:
    """The types that a schema names; all of them if it names none."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    return frozenset(_TYPES)


def is_trivial(schema: object) -> bool:
    """Whether every value fits a schema, because it is true or has only annotations."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def _drop_unknown_names(schema: dict[str, object]) -> None:
    """Drops a `$schema` that names no draft of JSON Schema, and an `$id` that is no URI."""
    draft = schema.get("$schema")
    if draft is not None:
        found = _KNOWN_DRAFT.fullmatch(draft) if isinstance(draft, str) else None
        if found is None:
            del schema["$schema"]
        elif found[1].startswith("draft-"):
            schema["$schema"] = f"http://json-schema.org/{found[1]}/schema#"
        else:
            schema["$schema"] = f"https://json-schema.org/{found[1]}/schema"
    schema_id = schema.get("$id")
    if schema_id is not None and not (isinstance(schema_id, str) and _URI.fullmatch(schema_id)):
        del schema["$id"]


def _correct_counts(schema: dict[str, object]) -> None:
    """100.0 -> 100. Drops limits that no answer reaches, and minima of 0."""
    for name in _COUNTS:
        for keyword in (f"min{name}", f"max{name}"):
            count = schema.get(keyword)
            if isinstance(count, float) and count.is_integer():
                count = schema[keyword] = int(count)
            if type(count) is int and (
                count >= _MAX_COUNT if keyword.startswith("max") else count == 0
            ):
                # `minContains` stays, because its default is 1.
                if keyword != "minContains":
                    del schema[keyword]


def _correct_bounds(schema: dict[str, object]) -> None:
    """Drops bounds that no ordinary number reaches. For integers, keeps bounds of 64 bits."""
    is_integer = types_of(schema) & {"number", "integer"} == {"integer"}
    for keyword in _BOUNDS:
        bound = schema.get(keyword)
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            continue
        is_minimum = keyword in ("minimum", "exclusiveMinimum")
        outwards = -bound if is_minimum else bound
        # A Python integer may be too large for a float.
        is_beyond = outwards >= _INT64_END
        # 2**63 - 1, the largest integer of 64 bits, is rounded to 2**63 in a float64.
        if is_integer and is_beyond and outwards <= _INT64_END:
            schema[keyword] = -_LAST_INT64 if is_minimum else _LAST_INT64
        elif is_integer and _LAST_INT64 < outwards < _INT64_END:
            schema[keyword] = -_LAST_INT64 if is_minimum else _LAST_INT64
        elif is_beyond or math.isnan(outwards):
            del schema[keyword]
        elif isinstance(bound, float) and 0 < abs(bound) < _SMALLEST_BOUND:
            _replace_small_bound(schema, keyword, bound)
    step = schema.get("multipleOf")
    if step == 1 and step is not True and is_integer:
        del schema["multipleOf"]


def _replace_small_bound(schema: dict[str, object], keyword: str, bound: float) -> None:
    """ "minimum": 1e-300 -> "exclusiveMinimum": 0; "minimum": -1e-300 -> "minimum": 0."""
    side = keyword[-7:].lower()
    is_inwards = (bound > 0) == (side == "minimum")
    del schema[keyword]
    exclusive = f"exclusive{side.capitalize()}"
    name = exclusive if is_inwards or keyword == exclusive else side
    schema.setdefault(name, 0)


def _simplify_conditions(schema: dict[str, object]) -> None:
    branches = [schema.get(name, True) for name in ("then", "else")]
    if "if" not in schema or all(map(is_trivial, branches)):
        for name in ("if", "then", "else"):
            schema.pop(name, None)
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        needs = schema.get(keyword)
        if isinstance(needs, dict) and all(n == [] or is_trivial(n) for n in needs.values()):
            del schema[keyword]


def _simplify_not(schema: dict[str, object]) -> None:
    """Replaces `not` of types by `type`: {"not": {"type": "null"}} becomes all other types."""
    excluded = schema.get("not")
    if "not" not in schema or not isinstance(excluded, (dict, bool)):
        return
    if excluded is False:
        del schema["not"]
    elif is_trivial(excluded):
        del schema["not"]
        _make_impossible(schema)
    elif excluded.keys() - _ANNOTATIONS == {"type"} and types_of(excluded) <= {*_TYPES}:
        left = types_of(schema) - types_of(excluded)
        if "number" in types_of(excluded):
            left -= {"integer"}
        del schema["not"]
        if left:
            # In a fixed order, which does not depend on hashes.
            schema["type"] = [name for name in (*_TYPES, "integer") if name in left]
        else:
            _make_impossible(schema)


def _make_impossible(schema: dict[str, object]) -> None:
    """No value fits an empty `enum`."""
    schema["enum"] = []


def _simplify_arrays(schema: dict[str, object]) -> None:
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (type(most) is int and most <= 1):
        schema.pop("uniqueItems", None)
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        for keyword in ("contains", "minContains", "maxContains"):
            schema.pop(keyword, None)
    rest = schema.get("unevaluatedItems")
    # In drafts that have this keyword, `items` is not a list.
    if is_trivial(rest) or (rest is not None and "items" in schema):
        schema.pop("unevaluatedItems", None)
    elif rest is not None and not any(keyword in schema for keyword in (*_IN_PLACE, "contains")):
        schema["items"] = schema.pop("unevaluatedItems")


def _simplify_objects(schema: dict[str, object]) -> None:
    required = schema.get("required")
    # Draft 3 has a boolean in the schema of each property.
    if isinstance(required, bool):
        required = schema.pop("required")
    rest = schema.get("unevaluatedProperties")
    if is_trivial(rest) or (rest is not None and "additionalProperties" in schema):
        schema.pop("unevaluatedProperties", None)
    elif rest is not None and not any(keyword in schema for keyword in _IN_PLACE):
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")
    _simplify_property_names(schema)
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    names = schema.get("properties")
    if type(least) is int and isinstance(required, list) and least <= len(set(map(str, required))):
        del schema["minProperties"]
    if (
        type(most) is int
        and isinstance(names, dict)
        and schema.get("additionalProperties") is False
        and not schema.get("patternProperties")
        and most >= len(names)
    ):
        del schema["maxProperties"]


def _simplify_property_names(schema: dict[str, object]) -> None:
    """Drops `propertyNames` that allow all strings, and rewrites lists and patterns of names.

    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": X} becomes
    {"patternProperties": {"^(?:a|b)$": X}, "additionalProperties": false}.
    """
    names = schema.get("propertyNames")
    if names is True:
        del schema["propertyNames"]
    if not isinstance(names, dict):
        return
    limits = {k: v for k, v in names.items() if k not in _ANNOTATIONS}
    if "string" in types_of(names):
        limits.pop("type", None)
    if not limits:
        del schema["propertyNames"]
        return
    if schema.get("properties") or schema.get("patternProperties"):
        return
    pattern = _pattern_of_names(limits)
    if pattern is not None:
        del schema["propertyNames"]
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False


def _pattern_of_names(limits: Mapping[str, object]) -> str | None:
    """A regular expression for the names that `pattern`, `const` or `enum` allows."""
    match limits:
        case {"pattern": str(pattern), **rest} if not rest:
            return pattern
        case {"const": str(name), **rest} if not rest:
            return f"^{_literal(name)}$"
        case {"enum": [*names], **rest} if not rest and names:
            if all(isinstance(name, str) for name in names):
                return f"^(?:{'|'.join(map(_literal, names))})$"
    return None


def _literal(text: str) -> str:
    return re.sub(r"[.*+?^${}()|\[\]\\/]", r"\\\g<0>", text)
