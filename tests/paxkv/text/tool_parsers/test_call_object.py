"""Reading a call character by character: which text is kept, and how much is copied."""

import tracemalloc

import pytest

from paxkv.text.tool_parsers.call_object import CallObject
from paxkv.text.tool_parsers.tool_parser import ArgumentsPart, CallStart, ToolEvent, join_events

LONG = "x" * 100_000


def _read(text: str) -> tuple[CallObject, list[ToolEvent]]:
    call = CallObject(0, needs_arguments=False)
    events: list[ToolEvent] = []
    for char in text:
        events += call.feed(char)
    return call, join_events(events)


def test_text_is_kept_only_while_it_may_be_content():
    assert _read('{"name": "f", "argu')[0].raw == '{"name": "f", "argu'
    # After the start of the call, arguments are not kept, because they may be megabytes.
    assert _read('{"name": "f", "arguments": {"a": 1}}')[0].raw == '{"name": "f", "arguments": {'


@pytest.mark.parametrize(
    ("start", "end", "name", "arguments"),
    [
        ('{"name": "f", "arguments": "', '"}', "f", f'"{LONG}"'),
        ('{"arguments": "', '", "name": "f"}', "f", f'"{LONG}"'),
        ('{"name": "', '", "arguments": {}}', LONG, "{}"),
    ],
    ids=["arguments", "arguments_first", "name"],
)
def test_character_of_a_long_call_copies_no_earlier_text(start, end, name, arguments):
    call, events = _read(start + LONG[:-20])
    tracemalloc.start()
    copied = []
    for char in LONG[-20:]:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        events += call.feed(char)
        copied.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    # One of the twenty characters may have enlarged a list.
    assert sorted(copied)[-2] < len(LONG) / 10
    for char in end:
        events += call.feed(char)
    assert join_events(events) == [CallStart(0, name), ArgumentsPart(0, arguments)]
