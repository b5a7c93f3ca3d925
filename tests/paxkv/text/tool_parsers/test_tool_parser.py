"""The result of every parser does not depend on the pieces of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.text.tool_parsers.forced_call import CallListParser, NamedCallParser
from paxkv.text.tool_parsers.hermes import HermesToolParser
from paxkv.text.tool_parsers.llama3_json import Llama3JsonToolParser
from paxkv.text.tool_parsers.tool_parser import ArgumentsPart, ContentPart, join_events

PARSERS = {
    "hermes": HermesToolParser,
    "llama3_json": Llama3JsonToolParser,
    "required": CallListParser,
    "named": lambda: NamedCallParser("f"),
}
# Random sequences of these are calls, incomplete calls and similar texts.
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<tool_call", "<|python_tag|>", "<"),
    *(
        '{"name": "f", "arguments": ',
        '{"name": "g", "parameters": ',
        '{"arguments": ',
        '"name": "h"',
    ),
    *('{"a": 1}', '{"b": "}<tool_call>"}', "[1, {}]", "null", '"s\\""', "{", "}", "}}", "[", "]"),
    *(", ", "; ", ": ", '"', "\\", " ", "\n", "text", "é"),
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def _cut(text, cuts):
    places = sorted({min(cut, len(text)) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", PARSERS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 120), max_size=8))
def test_result_does_not_depend_on_the_pieces(name, text, cuts):
    whole = PARSERS[name]()
    expected = join_events([*whole.feed(text), *whole.finish()])
    for pieces in (_cut(text, cuts), list(text)):
        parser = PARSERS[name]()
        events = [event for piece in pieces for event in parser.feed(piece)]
        assert join_events([*events, *parser.finish()]) == expected


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
@given(text=TEXTS)
def test_text_without_a_call_is_unchanged(name, text):
    parser = PARSERS[name]()
    events = join_events([*parser.feed(text), *parser.finish()])
    if all(isinstance(event, ContentPart) for event in events):
        assert "".join(event.text for event in events) == text


def test_only_consecutive_events_of_one_call_are_joined():
    parts = [ArgumentsPart(0, "a"), ArgumentsPart(0, "b"), ArgumentsPart(1, "c")]
    assert join_events(parts) == [ArgumentsPart(0, "ab"), ArgumentsPart(1, "c")]
