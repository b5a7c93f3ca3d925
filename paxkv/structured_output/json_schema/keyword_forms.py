"""Finds keywords of a JSON schema whose values have the wrong form, and describes them."""

import json
from collections.abc import Iterator

from paxkv.structured_output.json_schema.schema_parts import SchemaPart

_SCHEMA = "an object or a boolean"
_NAMED_SCHEMAS = "an object whose values are schemas"
_SCHEMA_LIST = "a list of schemas"
_STRINGS = "a list of strings"
_TYPES = "a string or a list of strings"
_COUNT = "a whole number from 0 on"
# Keywords that the grammar is made from. A schema is refused if the value of one has another form.
_FORMS = {
    "properties": _NAMED_SCHEMAS,
    "patternProperties": _NAMED_SCHEMAS,
    "allOf": _SCHEMA_LIST,
    "anyOf": _SCHEMA_LIST,
    "oneOf": _SCHEMA_LIST,
    "prefixItems": _SCHEMA_LIST,
    "additionalProperties": _SCHEMA,
    "additionalItems": _SCHEMA,
    "items": _SCHEMA,
    "required": _STRINGS,
    "enum": "a list of values",
    "type": _TYPES,
    "$ref": "a string",
}
# Keywords that only exclude values. They are ignored if they have another form and the schema is
# not strict.
_LIMIT_FORMS = {
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), "a number"),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), "a number or a boolean"),
    **dict.fromkeys(("pattern", "format"), "a string"),
}
# For all other keywords, the value null means that the keyword is absent.
_NULL_IS_A_VALUE = ("enum",)
_SHOWN_CHARS = 100


def wrong_form(part: SchemaPart) -> str | None:
    """Describes the first keyword of one schema that has the wrong form; None if there is none.

    "#/properties/a/required is 5; it must be a list of strings"
    """
    for keyword, value in part.schema.items():
        form = _FORMS.get(keyword)
        if form is None or (value is None and keyword not in _NULL_IS_A_VALUE):
            continue
        steps = next(_wrong_steps(keyword, form, value), None)
        if steps is not None:
            return _description(part, (keyword, *steps), form)
    return None


def wrong_limit(part: SchemaPart, keyword: str) -> str | None:
    """Like `wrong_form`, for one keyword that only excludes values."""
    form = _LIMIT_FORMS.get(keyword)
    if form is None or _has_form(form, part.schema[keyword]):
        return None
    return _description(part, (keyword,), form)


def shown(value: object) -> str:
    """A value as JSON, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _description(part: SchemaPart, steps: tuple[object, ...], form: str) -> str:
    keyword, *inner_steps = steps
    value = part.schema[keyword]
    for step in inner_steps:
        value = value[step]
    wanted = f"it must be {form}"
    if inner_steps:
        wanted = f'a schema in "{keyword}" must be {_SCHEMA}'
        if form == _STRINGS:
            wanted = f'an entry of "{keyword}" must be a string'
    return f"{part.place_of(*steps)} is {shown(value)}; {wanted}"


def _wrong_steps(keyword: str, form: str, value: object) -> Iterator[tuple[object, ...]]:
    """Paths below a keyword to values of the wrong form; () is the value of the keyword itself."""
    # Up to draft 2019-09, "items" may be a list of schemas.
    if form == _SCHEMA_LIST or (keyword == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            yield ()
        else:
            yield from ((k,) for k, inner in enumerate(value) if not _has_form(_SCHEMA, inner))
    elif form == _NAMED_SCHEMAS and isinstance(value, dict):
        yield from ((name,) for name, inner in value.items() if not _has_form(_SCHEMA, inner))
    elif form == _STRINGS and isinstance(value, list):
        yield from ((k,) for k, inner in enumerate(value) if not isinstance(inner, str))
    elif not _has_form(form, value):
        yield ()


def _has_form(form: str, value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if form == _COUNT:
        return is_number and value >= 0 and (isinstance(value, int) or value.is_integer())
    if form == _TYPES and isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    return {
        _SCHEMA: isinstance(value, (dict, bool)),
        _NAMED_SCHEMAS: isinstance(value, dict),
        _STRINGS: isinstance(value, list),
        _TYPES: isinstance(value, str),
        "a list of values": isinstance(value, list),
        "a string": isinstance(value, str),
        "a number": is_number,
        "a number or a boolean": is_number or isinstance(value, bool),
    }[form]
