"""Responses are stored up to a limit of bytes; running responses are never dropped."""

import msgspec
import pytest

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.error_response import OverloadedError, UnknownResponseError
from paxkv.server.protocol.responses.bodies import MessageItem, ResponseBody, TextPart
from paxkv.server.protocol.responses.response_store import ResponseStore


def _response(name, *, status="completed", text="hi"):
    return ResponseBody(
        id=f"resp_{name}",
        created_at=0,
        status=status,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="m",
        output=[MessageItem(id="msg_1", status=status, content=[TextPart(text=text)])],
        parallel_tool_calls=True,
        reasoning={},
        temperature=1.0,
        text={},
        tool_choice="auto",
        tools=[],
        top_p=1.0,
        user=None,
    )


ITEM = {"type": "message", "role": "user", "content": "one"}
SIZE = len(msgspec.json.encode(_response("a"))) + len(msgspec.json.encode([ITEM]))
SIZE += len(msgspec.json.encode(_response("a").output))


def _is_there(store, name):
    try:
        store.get(f"resp_{name}")
    except UnknownResponseError:
        return False
    return True


def test_a_conversation_is_its_items_and_the_answer():
    store = ResponseStore(2 * SIZE)
    assert store.put(_response("a", text="two"), [ITEM])
    first, second = store.conversation("resp_a")
    assert first == ITEM
    assert (second["role"], second["content"][0]["text"]) == ("assistant", "two")
    assert msgspec.json.decode(store.get("resp_a").body)["id"] == "resp_a"


def test_the_least_recently_used_is_dropped_within_the_bound():
    store = ResponseStore(3 * SIZE)
    for name in "abc":
        assert store.put(_response(name), [ITEM])
    store.get("resp_a")
    store.put(_response("d"), [ITEM])
    assert [name for name in "abcd" if _is_there(store, name)] == ["a", "c", "d"]
    assert store.num_bytes == 3 * SIZE
    with pytest.raises(UnknownResponseError, match="dropped for later ones"):
        store.get("resp_b")


def test_an_answer_that_is_too_large_is_not_stored_and_evicts_none():
    store = ResponseStore(2 * SIZE)
    store.put(_response("a"), [ITEM])
    assert not store.put(_response("b", text="x" * 2 * SIZE), [ITEM])
    assert _is_there(store, "a") and not _is_there(store, "b")
    with pytest.raises(InvalidRequestError, match="--response-store-bytes"):
        store.put_running(_response("c", status="queued", text="x" * 2 * SIZE), [ITEM])


def test_a_running_answer_is_kept_until_it_ends():
    store = ResponseStore(3 * SIZE)
    store.put_running(_response("a", status="queued"), [ITEM])
    store.put_running(_response("b", status="queued"), [ITEM])
    with pytest.raises(InvalidRequestError, match="is queued"):
        store.conversation("resp_a")
    with pytest.raises(OverloadedError):
        store.put_running(_response("c", status="queued", text="x" * SIZE), [ITEM])
    for name in "def":
        store.put(_response(name), [ITEM])
    assert [name for name in "abdef" if _is_there(store, name)] == ["a", "b", "f"]
    # The new response replaces the stored one with the same id.
    assert store.put(_response("a"), [ITEM])
    store.put(_response("g"), [ITEM])
    store.put(_response("h"), [ITEM])
    assert [name for name in "abgh" if _is_there(store, name)] == ["b", "g", "h"]
    assert store.num_bytes <= 3 * SIZE
    assert not store.put(_response("b", text="x" * 3 * SIZE), [ITEM])
    assert not _is_there(store, "b")
