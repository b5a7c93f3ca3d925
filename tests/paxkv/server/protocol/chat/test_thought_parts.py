"""Thoughts have one text whatever form a client sends them in."""

import pytest

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.chat.thought_parts import thought_text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ""),
        ("hm", "hm"),
        ([], ""),
        (["h", {"type": "text", "text": "m"}], "hm"),
        ({"type": "thinking", "thinking": "hm"}, "hm"),
        ({"type": "reasoning", "content": [{"text": "h"}, "m"], "summary": [{"text": "x"}]}, "hm"),
        ({"type": "redacted_thinking", "data": "gAAA"}, ""),
    ],
)
def test_thoughts_are_read(value, expected):
    assert thought_text("x", value) == expected


@pytest.mark.parametrize("value", [5, [5], {"thinking": 5}, {"text": [{"text": 5}]}])
def test_other_values_are_refused_by_their_place(value):
    with pytest.raises(InvalidRequestError, match="^x") as raised:
        thought_text("x", value)
    assert raised.value.param.startswith("x")
