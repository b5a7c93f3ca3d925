"""`find_unwritable`: finds values that Python reads from JSON, but that JSON cannot express."""

import json
import math

from paxkv.structured_output.json_schema.schema_parts import escape_step


def find_unwritable(schema: object) -> str | None:
    """Describes the first such value of a schema, with its place; None if there is none.

    `{"const": NaN}` -> "#/const is NaN, ...". JSON text such as 1e400 is read as infinity, and
    "\\ud800" as half a character.
    """
    waiting = [(schema, "#")]
    while waiting:
        value, place = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return f"{place} is {json.dumps(value)}, which is not a JSON number; send a finite one"
        if isinstance(value, str) and _has_half_character(value):
            return _half_character(place, value)
        inner = value if isinstance(value, dict) else {}
        name = next((name for name in inner if _has_half_character(name)), None)
        if name is not None:
            return _half_character(f"a name in {place}", name)
        steps = inner.items() if inner else enumerate(value if isinstance(value, list) else ())
        waiting += reversed([(v, f"{place}/{escape_step(str(step))}") for step, v in steps])
    return None


def _has_half_character(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _half_character(place: str, text: str) -> str:
    return (
        f"{place} is {json.dumps(text)[:80]}, which has half a character (a surrogate without its "
        "other half); send whole characters"
    )
