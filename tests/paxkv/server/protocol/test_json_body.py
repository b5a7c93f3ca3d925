"""No body within the limits holds the event loop for long, and text may hold any signs."""

import asyncio
import json
import sys
import threading
from typing import Literal

import msgspec
import pytest
from starlette.requests import Request

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.json_body import (
    MAX_PARTS,
    MAX_STRINGS,
    convert_fields,
    decode_json,
    decode_object,
    read_body,
)


@pytest.mark.parametrize(
    ("part", "num_parts"),
    [(b"[]", 1), (b"{}", 1), (b"[[[]]]", 3), (b'{"a":1}', 2), (b'["a{"]', 1), (b'{"[:":{}}', 3)],
    ids=repr,
)
def test_parts_are_counted(part, num_parts):
    # The object, its key and the array are three.
    most = (MAX_PARTS - 3) // num_parts
    assert decode_object(b'{"x":[%s]}' % b",".join([part] * most))
    with pytest.raises(InvalidRequestError, match="too many parts"):
        decode_object(b'{"x":[%s]}' % b",".join([part] * (most + 1)))


@pytest.mark.parametrize("text", ["[{:", '"[{:', "\\[", '\\"{', "\\\\", '\\\\"[', "é\n{"])
def test_brackets_and_commas_in_strings_are_not_counted(text):
    body = {"prompt": text * MAX_PARTS, "other": [text] * 9}
    assert decode_object(json.dumps(body).encode()) == body


@pytest.mark.parametrize("string", [b'"[:"', b'""', b'"\\""'])
def test_strings_are_counted(string):
    # The key is one of them.
    assert decode_object(b'{"[":[%s]}' % b",".join([string] * (MAX_STRINGS - 1)))
    with pytest.raises(InvalidRequestError, match="too many parts"):
        decode_object(b'{"[":[%s]}' % b",".join([string] * MAX_STRINGS))


def test_an_error_about_json_names_what_was_read():
    for text in (b"{", b"\xff", b'"\\ud800"', b"[" * 10_000, b"NaN"):
        with pytest.raises(InvalidRequestError, match="^that thing "):
            decode_json(text, name="that thing")


def test_a_byte_order_mark_before_a_body_is_skipped():
    assert decode_object(b'\xef\xbb\xbf{"prompt": "a"}') == {"prompt": "a"}


class _Numbers(msgspec.Struct):
    count: int | None = None
    share: float = 0.5


class _Choice(msgspec.Struct):
    side: Literal["left", "right"] | None = None


def test_values_of_a_choice_are_named():
    with pytest.raises(InvalidRequestError) as raised:
        convert_fields({"side": "up"}, _Choice)
    assert str(raised.value) == "side: expected left or right, got 'up'."
    assert raised.value.param == "side"


def test_a_whole_number_may_be_written_as_a_float():
    found = convert_fields({"count": 16.0, "share": 1.0}, _Numbers)
    assert (found.count, type(found.count)) == (16, int)
    assert (found.share, type(found.share)) == (1.0, float)


@pytest.mark.parametrize("count", [1.5, 2.0**53, 1e300, True, "16"])
def test_numbers_that_are_not_whole_are_refused(count):
    with pytest.raises(InvalidRequestError, match="count: expected int"):
        convert_fields({"count": count}, _Numbers)


def _read(body, read):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    return read_body(request, read, max_body_bytes=2**23)


@pytest.mark.parametrize("num_ids", [2, 200_000])
def test_a_long_body_is_read_in_a_thread(num_ids):
    """An error in it is reported like an error in a short body."""

    async def run():
        has_begun, may_end, saw_the_loop = threading.Event(), threading.Event(), []

        def read(fields):
            has_begun.set()
            # False if this runs in the loop, which sets the event.
            saw_the_loop.append(may_end.wait(60.0 if num_ids > 2 else 0.1))
            if fields["prompt"][0]:
                raise InvalidRequestError("not 1")
            return len(fields["prompt"])

        for first in (b"0", b"1"):
            body = b'{"prompt":[' + b",".join([first] * num_ids) + b"]}"
            has_begun.clear()
            may_end.clear()
            reading = asyncio.ensure_future(_read(body, read))
            while not reading.done():
                await asyncio.sleep(0.001)
                if has_begun.is_set():
                    may_end.set()
            if first == b"0":
                assert reading.result() == num_ids
        with pytest.raises(InvalidRequestError, match="not 1"):
            reading.result()
        return saw_the_loop

    assert asyncio.run(run()) == [num_ids > 2] * 2


def test_a_number_beyond_all_floats_is_the_nearest_one():
    text = b'{"maximum": 1.8e308, "minimum": -1e999, "other": [0.5, 99999999999999999999]}'
    most = sys.float_info.max
    assert decode_json(text) == {
        "maximum": most,
        "minimum": -most,
        "other": [0.5, 99999999999999999999],
    }
