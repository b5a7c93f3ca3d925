"""JSON Schema keywords that a grammar may ignore, and the places at which they are reported."""

from collections.abc import Sequence
from urllib.parse import unquote

# llguidance implements none of the keywords in the first three lines. It implements the others, but
# not for every value.
IGNORABLE_KEYWORDS = (
    *("contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    "format",
    *("additionalProperties", "exclusiveMaximum", "exclusiveMinimum", "maxLength", "maximum"),
    *("maxProperties", "minLength", "minProperties", "minimum", "multipleOf", "oneOf", "pattern"),
    "patternProperties",
)


def keyword_at(place: str) -> str:
    """The keyword at a place, or the keyword that contains the place.

    "#/properties/a/not" -> "not"; "#/patternProperties/%5Ex" -> "patternProperties".
    """
    *_, outer, last = ("", *map(unquote, place.split("/")))
    return last if last in IGNORABLE_KEYWORDS else outer


def join_places(places: Sequence[str], max_chars: int) -> str:
    """Joins places with commas, up to `max_chars`, and states the number of omitted places."""
    joined = ""
    for idx, place in enumerate(places):
        longer = f"{joined}, {place}" if joined else place
        if len(longer) > max_chars:
            num_more = len(places) - idx
            return f"{joined}, and {num_more} more" if joined else f"{num_more} keywords"
        joined = longer
    return joined
