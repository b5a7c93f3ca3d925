"""Names of ignored parts are collected for the request that is being served."""

import asyncio

import pytest

from paxkv.server.protocol.ignored_parts import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    IgnoredParts,
    ignored_parts,
    is_ignored_tool,
    record_ignored,
    record_ignored_fields,
)


@pytest.fixture
def noted():
    ignored = IgnoredParts()
    token = ignored_parts.set(ignored)
    yield ignored.names
    ignored_parts.reset(token)


def test_fields_that_ask_for_nothing_are_not_reported(noted):
    ignored = {"a": (), "b": (1, []), "c": ()}
    record_ignored_fields({"a": None, "b": [], "c": 0, "d": 5}, ignored)
    assert noted == ["c"]


def test_names_are_those_of_a_header(noted):
    record_ignored("a\r\nb: ü")
    record_ignored("a\r\nb: ü")
    record_ignored("x" * 1000)
    assert noted == ["a??b: ?", "x" * MAX_NAME_CHARS]
    for k in range(100):
        record_ignored(str(k))
    assert len(noted) == MAX_NAMES


def test_ignored_fields_are_recorded_in_threads_of_the_request_too(noted):
    asyncio.run(asyncio.to_thread(record_ignored, "a"))
    assert noted == ["a"]


def test_outside_of_a_request_nothing_is_recorded():
    record_ignored("a")
    assert ignored_parts.get() is None


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ({"type": "web_search"}, True),
        ({"type": "function"}, False),
        ({"type": "functoin", "parameters": {}}, False),
        ({"type": 5}, False),
        ({}, False),
    ],
)
def test_a_tool_of_another_type_is_ignored_unless_it_has_our_form(noted, tool, expected):
    assert is_ignored_tool(tool, own_types=("function",), form="parameters") is expected
    assert bool(noted) is expected
