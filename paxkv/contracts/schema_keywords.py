"""Keywords of JSON Schema that a grammar may leave out, by the places that are reported of them."""

from collections.abc import Sequence
from urllib.parse import unquote

# llguidance implements no keyword of the first three lines; of the others, not every value.
IGNORABLE_KEYWORDS = (
    *("contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    "format",
    *("additionalProperties", "exclusiveMaximum", "exclusiveMinimum", "maxLength", "maximum"),
    *("maxProperties", "minLength", "minProperties", "minimum", "multipleOf", "oneOf", "pattern"),
    "patternProperties",
)


def keyword_at(place: str) -> str:
    """The keyword at a place: "#/properties/a/not" -> "not", and that of an entry of a keyword:
    "#/patternProperties/%5Ex" -> "patternProperties".
    """
    *_, outer, last = ("", *map(unquote, place.split("/")))
    return last if last in IGNORABLE_KEYWORDS else outer


def join_places(places: Sequence[str], max_chars: int) -> str:
    """Places with commas between them; as many as fit, and how many more there are."""
    joined = ""
    for idx, place in enumerate(places):
        longer = f"{joined}, {place}" if joined else place
        if len(longer) > max_chars:
            num_more = len(places) - idx
            return f"{joined}, and {num_more} more" if joined else f"{num_more} keywords"
        joined = longer
    return joined
