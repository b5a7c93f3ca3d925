"""Calls in Hermes' format are found in any text."""

import json

from paxkv.text.tool_parsers.hermes import HermesToolParser
from paxkv.text.tool_parsers.tool_parser import ArgumentsPart, CallStart, ContentPart, join_events


def _read(text):
    parser = HermesToolParser()
    return join_events([*parser.feed(text), *parser.finish()])


def test_calls_are_found_after_content():
    text = (
        'hi <tool_call>\n{"name": "f", "arguments": {"a": "x}</tool_call>"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b": [1]}, "name": "g"}</tool_call>\n'
    )
    assert _read(text) == [
        ContentPart("hi "),
        CallStart(0, "f"),
        ArgumentsPart(0, '{"a": "x}</tool_call>"}'),
        CallStart(1, "g"),
        ArgumentsPart(1, '{"b": [1]}'),
    ]


def test_arguments_come_before_the_call_is_complete():
    parser = HermesToolParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "lo') == [
        CallStart(0, "f"),
        ArgumentsPart(0, '{"a": "lo'),
    ]
    assert parser.feed("ng") == [ArgumentsPart(0, "ng")]


def test_text_that_is_not_a_call_is_content():
    for text in (
        '<tool_call>{"x"</tool_call> b',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "argu',
        "a <tool",
        "1 < 2",
    ):
        assert _read(text) == [ContentPart(text)]


def test_call_without_arguments_has_empty_arguments():
    events = [CallStart(0, "f"), ArgumentsPart(0, "{}")]
    assert _read('<tool_call>{"name": "f"}</tool_call>') == events


def test_closing_tag_ends_a_call_with_an_incomplete_object():
    assert _read('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so') == [
        CallStart(0, "f"),
        ArgumentsPart(0, '{"a": 1'),
        ContentPart(" so"),
    ]


def test_text_between_calls_is_kept_but_white_space_is_dropped():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = _read(f"{call} and \n{call} \n")
    contents = [event.text for event in events if isinstance(event, ContentPart)]
    assert contents == [" and"]


def test_escapes_in_names_and_arguments_are_read_as_json():
    arguments = {"a": 'quote " brace } \\', "ü": ["]"]}
    text = json.dumps({"name": "fü", "arguments": arguments})
    start, part = _read(f"<tool_call>{text}</tool_call>")
    assert start.name == "fü" and json.loads(part.text) == arguments


def test_object_whose_name_is_not_text_is_not_a_call():
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert _read(text) == [ContentPart(text)]
