"""Places of ignored keywords are read and shortened."""

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
def test_a_place_names_its_keyword(place, keyword):
    assert keyword_at(place) == keyword


@pytest.mark.parametrize(
    ("max_chars", "joined"),
    [(16, "#/a, #/b, #/c"), (8, "#/a, #/b, and 1 more"), (3, "#/a, and 2 more"), (2, "3 keywords")],
)
def test_only_so_many_places_are_named(max_chars, joined):
    assert join_places(["#/a", "#/b", "#/c"], max_chars) == joined
