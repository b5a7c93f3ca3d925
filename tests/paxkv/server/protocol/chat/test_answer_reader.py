"""Thoughts, content and calls of an answer, of which some text is held back until its end."""

import pytest

from paxkv.server.protocol.chat.answer_reader import AnswerReader
from paxkv.server.protocol.tool_choice import ToolUse
from paxkv.text.tool_parsers.hermes import HermesToolParser

HERMES = ToolUse(make_parser=HermesToolParser)


def _read(pieces, tool_use=HERMES, **options):
    reader = AnswerReader(tool_use, **{"starts_thinking": False, **options})
    parts = [reader.read(p, is_last=i + 1 == len(pieces)) for i, p in enumerate(pieces)]
    calls: dict[int, str] = {}
    for part in parts:
        for call in part.calls:
            calls[call.index] = calls.get(call.index, "") + call.arguments
    reasoning = "".join(part.reasoning for part in parts)
    return reasoning, "".join(part.content for part in parts), calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a <tool", ("", "a <tool", {})),
        ("<think>a</thi", ("a</thi", "", {})),
        ("<think>a</think>b<tool_call>", ("a", "b<tool_call>", {})),
        ('<tool_call>{"name": "f", "arg', ("", '<tool_call>{"name": "f", "arg', {})),
        (
            '<think>a</think>b<tool_call>{"name": "f", "arguments": {"x": [1]}}</tool_call>',
            ("a", "b", {0: '{"x": [1]}'}),
        ),
        ("<thin", ("", "<thin", {})),
        ("", ("", "", {})),
    ],
)
def test_nothing_that_was_held_back_is_lost(text, expected):
    assert _read([text]) == expected
    assert _read([*text, ""]) == expected
    assert _read([text[:7], text[7:]]) == expected


def test_without_parsers_text_is_content():
    text = "<think>a</think><tool_call>{}"
    assert _read([text], ToolUse(), starts_thinking=None) == ("", text, {})


def test_thoughts_may_be_dropped_and_calls_limited():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    one = ToolUse(make_parser=HermesToolParser, max_calls=1)
    text = "<think>a</think>" + call + call
    assert _read([text], one, include_reasoning=False) == ("", "", {0: "{}"})


def test_pieces_have_the_order_of_the_text():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    part = AnswerReader(HERMES, starts_thinking=None).read(f"a{call}b", is_last=True)
    first, second, third = part.pieces
    assert (first, second.name, third) == ("a", "f", "b")
    assert (part.content, part.calls, part.is_empty) == ("ab", [second], False)
    assert AnswerReader(HERMES, starts_thinking=None).read("", is_last=True).is_empty
