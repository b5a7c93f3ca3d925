"""Keywords of places, and shortened lists of places."""

import pytest

from paxkv.contracts.schema_keywords import join_places, keyword_at


@pytest.mark.parametrize(
    ("place", "keyword"),
    [
        ("#/uniqueItems", "uniqueItems"),
        ("tool:f#/properties/not/format", "format"),
        ("#/properties/a/patternProperties/%5Ex~1y", "patternProperties"),
        ("#/anyOf/0/oneOf", "oneOf"),
    ],
)
def test_keyword_is_found_from_its_place(place, keyword):
    assert keyword_at(place) == keyword


@pytest.mark.parametrize(
    ("max_chars", "joined"),
    [(16, "#/a, #/b, #/c"), (8, "#/a, #/b, and 1 more"), (3, "#/a, and 2 more"), (2, "3 keywords")],
)
def test_list_of_places_is_limited_in_length(max_chars, joined):
    assert join_places(["#/a", "#/b", "#/c"], max_chars) == joined
