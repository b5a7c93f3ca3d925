"""Small schemas are tried as llguidance will see them."""

import pytest

from paxkv.structured_output.grammar_compiler import LIMITS
from paxkv.structured_output.grammar_tokenizer import make_grammar_tokenizer
from paxkv.structured_output.json_schema.schema_probe import LlguidanceProbe
from tests.paxkv.structured_output.demo_grammars import SETUP

PROBE = LlguidanceProbe(make_grammar_tokenizer(**SETUP), LIMITS)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [({"pattern": "a"}, True), ({"pattern": "(?=a)"}, False), ({"enum": []}, True), ({}, True)],
    ids=str,
)
def test_a_schema_that_no_value_fits_compiles(schema, expected):
    assert PROBE.compiles(schema) is expected


@pytest.mark.parametrize(
    ("pattern", "text", "expected"), [("^b", "ba", True), ("a", "ba", True), ("^a", "ba", False)]
)
def test_a_pattern_is_found_anywhere_in_a_text(pattern, text, expected):
    assert PROBE.matches(pattern, text) is expected


@pytest.mark.parametrize(
    ("pattern", "names", "expected"),
    [
        ("^(x|y)$", ["x", "y", "z"], False),
        ("^(x|y)$", ["x"], True),
        ("^x", ["x"], True),
        ("x", ["x"], True),
        ("^(a|b)?$", ["", "b", "a"], False),
        ("^$", [], True),
    ],
)
def test_a_pattern_has_more_names_unless_all_are_listed(pattern, names, expected):
    assert PROBE.has_more_names(pattern, names) is expected
