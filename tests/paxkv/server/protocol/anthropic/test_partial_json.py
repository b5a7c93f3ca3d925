"""JSON that was cut off is read as Anthropic's clients read a stream."""

import json

import jiter
import pytest

from paxkv.server.protocol.anthropic.partial_json import complete_part

VALUE = {
    "a": 1,
    "b": [2, {"c": 'x\\"y{', "d": None}, "q,[", []],
    "e": -12.5,
    "": "\u00e9",
    "g": True,
}


@pytest.mark.parametrize("text", [json.dumps(VALUE), json.dumps(VALUE, indent=1)])
def test_every_prefix_is_parsed_as_by_anthropics_client(text):
    num_partial = 0
    for length in range(1, len(text) + 1):
        beginning = text[:length]
        assert complete_part(beginning) == jiter.from_json(beginning.encode(), partial_mode=True)
        num_partial += complete_part(beginning) not in ({}, VALUE)
    assert num_partial > len(text) / 2


@pytest.mark.parametrize("text", ["", "nonsense", "}{", "[" * 100_000])
def test_a_body_that_is_not_json_has_no_parts(text):
    assert complete_part(text) is None
