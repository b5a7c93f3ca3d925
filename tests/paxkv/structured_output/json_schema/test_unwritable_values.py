"""Numbers and half characters that JSON does not have are found with their place."""

import pytest

from paxkv.structured_output.json_schema.unwritable_values import find_unwritable


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "# is NaN, which"),
        ({"a": [0, {"b/c": float("inf")}]}, "#/a/1/b~1c is Infinity, which"),
        ([1, "a\ud800"], '#/1 is "a\\ud800", which has half a character'),
        ({"a": {"\udfff": 1}}, 'a name in #/a is "\\udfff", which has half a character'),
        # The first one counts.
        ({"a": ["\udc00"], "b": float("nan")}, '#/a/0 is "\\udc00"'),
    ],
)
def test_the_first_one_is_named(value, words):
    assert find_unwritable(value).startswith(words)


def test_what_json_allows_passes():
    assert find_unwritable({"a": [1.5, 10**400, None, True, "\U0001f600", {"é": {}}]}) is None
