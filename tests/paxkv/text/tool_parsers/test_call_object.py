"""One call's object, character by character: what is kept of it, and how long it takes."""

import time

import pytest

from paxkv.text.tool_parsers.call_object import CallObject
from paxkv.text.tool_parsers.tool_parser import ArgumentsPart, CallStart, ToolEvent, join_events

LONG = "x" * 300_000


def _take(text: str) -> tuple[CallObject, list[ToolEvent]]:
    call = CallObject(0, needs_arguments=False)
    events: list[ToolEvent] = []
    for char in text:
        events += call.take(char)
    return call, join_events(events)


def test_text_is_kept_for_as_long_as_it_may_be_content():
    assert _take('{"name": "f", "argu')[0].raw == '{"name": "f", "argu'
    # From the start on, arguments may be megabytes that nobody reads again.
    assert _take('{"name": "f", "arguments": {"a": 1}}')[0].raw == '{"name": "f", "arguments": {'


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (f'{{"name": "f", "arguments": "{LONG}"}}', "f", f'"{LONG}"'),
        (f'{{"arguments": "{LONG}", "name": "f"}}', "f", f'"{LONG}"'),
        (f'{{"name": "{LONG}", "arguments": {{}}}}', LONG, "{}"),
    ],
    ids=["arguments", "arguments_first", "name"],
)
def test_long_calls_take_linear_time(text: str, name: str, arguments: str):
    started_s = time.process_time()
    assert _take(text)[1] == [CallStart(0, name), ArgumentsPart(0, arguments)]
    # Far above the need, far below what a copy of all at each character takes.
    assert time.process_time() - started_s < 3
