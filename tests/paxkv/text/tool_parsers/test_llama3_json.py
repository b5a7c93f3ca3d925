"""Calls in Llama's format are the whole answer; any other answer is content."""

from paxkv.text.tool_parsers.llama3_json import Llama3JsonToolParser
from paxkv.text.tool_parsers.tool_parser import ArgumentsPart, CallStart, ContentPart, join_events


def _read(text):
    parser = Llama3JsonToolParser()
    return join_events([*parser.feed(text), *parser.finish()])


def test_one_or_several_calls_are_found():
    assert _read(
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; '
        '{"type": "function", "name": "g", "arguments": {}}\n'
    ) == [
        CallStart(0, "f"),
        ArgumentsPart(0, '{"a": 1}'),
        CallStart(1, "g"),
        ArgumentsPart(1, "{}"),
    ]


def test_other_answers_are_unchanged_content():
    for text in (
        ' {"name": "Bob", "age": 3} x',
        'hello {"name": "f", "parameters": {}}',
        "<|py",
        "  ",
        '{"a": 1}',
        '{"name": "f"}',
        "[1]",
    ):
        assert _read(text) == [ContentPart(text)]


def test_text_after_a_call_is_kept():
    assert _read('{"name": "f", "parameters": {}} and more {') == [
        CallStart(0, "f"),
        ArgumentsPart(0, "{}"),
        ContentPart(" and more {"),
    ]
