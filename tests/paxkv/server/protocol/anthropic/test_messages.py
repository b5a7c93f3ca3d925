"""Messages of Anthropic's API become the messages that vLLM makes of them."""

import pytest

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.anthropic.messages import chat_messages_of
from paxkv.server.protocol.ignored_parts import IgnoredParts, ignored_parts

CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _user(*blocks: object) -> dict[str, object]:
    return {"role": "user", "content": list(blocks)}


def _assistant(*blocks: object) -> dict[str, object]:
    return {"role": "assistant", "content": list(blocks)}


def test_the_system_prompt_comes_first_and_its_blocks_are_joined():
    user = {"role": "user", "content": "hi"}
    assert chat_messages_of([user], "be brief") == [
        {"role": "system", "content": "be brief"},
        user,
    ]
    blocks = [_text("be "), _text("brief") | {"cache_control": {"type": "ephemeral"}}]
    assert chat_messages_of([user], blocks)[0] == {"role": "system", "content": "be brief"}
    assert chat_messages_of([user], None) == chat_messages_of([user], []) == [user]


def test_a_system_message_stays_where_it_is():
    later = {"role": "system", "content": [_text("now "), _text("in French")]}
    messages = chat_messages_of([{"role": "user", "content": "hi"}, later], None)
    assert messages[1] == {"role": "system", "content": "now in French"}


def test_claude_codes_billing_header_is_not_part_of_the_prompt():
    blocks = [_text("x-anthropic-billing-header: cch=0a1b;"), _text("be brief")]
    found = chat_messages_of([{"role": "user", "content": "hi"}], blocks)
    assert found[0]["content"] == "be brief"


def test_text_blocks_are_the_content():
    assert chat_messages_of([_user(_text("a"))], None) == [{"role": "user", "content": "a"}]
    two = [_text("a"), _text("b")]
    found = chat_messages_of([_user(_text("a"), _text(""), _text("b"))], None)
    assert found == [{"role": "user", "content": two}]
    assert chat_messages_of([_user()], None) == [{"role": "user", "content": ""}]


def test_thoughts_and_calls_are_parts_of_the_assistants_message():
    thought = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}
    secret = {"type": "redacted_thinking", "data": "gAAA"}
    messages = [_user(_text("go")), _assistant(thought, secret, _text("so: "), CALL), _user()]
    assert chat_messages_of(messages, None)[1] == {
        "role": "assistant",
        "content": "so: ",
        "reasoning": "hm",
        "tool_calls": [CHAT_CALL],
    }
    assert chat_messages_of([_assistant(CALL)], None)[0]["content"] == ""


def test_blocks_of_server_tools_are_left_out_and_reported():
    ignored = IgnoredParts()
    names = ignored.names
    token = ignored_parts.set(ignored)
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    reference = {"type": "tool_reference", "tool_name": "f"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [reference, _text("2")]}
    messages = [_assistant(search, found, _text("so"), CALL), _user(result)]
    assert chat_messages_of(messages, None) == [
        {"role": "assistant", "content": "so", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    types = ("server_tool_use", "web_search_tool_result", "tool_reference")
    assert names == [f"blocks of type {kind}" for kind in types]
    ignored_parts.reset(token)


@pytest.mark.parametrize(
    ("value", "arguments"), [([1], "[1]"), (-4, "-4"), ('{"a": ', '{"a": '), (None, None)]
)
def test_the_input_of_a_call_may_be_no_object(value, arguments):
    (message,) = chat_messages_of([_assistant(CALL | {"input": value})], None)
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_each_tool_result_is_a_message_and_comes_before_the_text():
    one = {"type": "tool_result", "tool_use_id": "c1", "content": "1", "is_error": True}
    two = {"type": "tool_result", "tool_use_id": "c2", "content": [_text("2"), _text("zwei")]}
    none = {"type": "tool_result", "tool_use_id": "c3"}
    results = [
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2\nzwei"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ]
    assert chat_messages_of([_user(one, two, none)], None) == results
    found = chat_messages_of([_user(_text("well?"), one, two, none)], None)
    assert found == [*results, {"role": "user", "content": "well?"}]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (None, ""),
        (5, "5"),
        ({"a": 1}, '{"a": 1}'),
        ([{"a": 1}, 2], '[{"a": 1}, 2]'),
        ([], ""),
    ],
)
def test_the_result_of_a_tool_may_be_any_json(content, shown):
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    found = chat_messages_of([_user(result)], None)
    assert found == [{"role": "tool", "tool_call_id": "c1", "content": shown}]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages must not be empty"),
        ([{"role": "tool", "content": "a"}], "messages[0].role must be one of user, assistant"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role must be"),
        ([{"role": "user"}], "messages[0].content must be a string or a list"),
        ([{"role": "system", "content": 5}], "messages[0].content must be"),
        ([_user("a")], "messages[0].content[0] must be a content block"),
        ([_user(_text("a"), {"type": "image"})], "[1].type must be one of text, tool_result here"),
        ([_user({"type": "document"})], "got 'document'; this server reads text only"),
        ([_user(CALL)], "messages[0].content[0].type"),
        ([_assistant({"type": "tool_result"})], "text, tool_use, thinking, redacted_thinking"),
        ([_user({"type": "text"})], "messages[0].content[0].text must be a string, got None"),
        ([_user({"type": "tool_result"})], "messages[0].content[0].tool_use_id must be"),
        (
            [_user({"type": "tool_result", "tool_use_id": "c", "content": {"type": "image"}})],
            "[0].content[0] must be",
        ),
        (
            [_user({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]})],
            "messages[0].content[0].content[0].type must be one of text here",
        ),
        ([_assistant(CALL | {"id": None})], "messages[0].content[0].id must be a string"),
        ([_assistant(CALL | {"name": 1})], "messages[0].content[0].name must be a string"),
        ([_assistant({"type": "thinking"})], "messages[0].content[0].thinking must be"),
        ([_user(*[_text("a")] * 10_001)], "has 10001 blocks; at most 10000"),
    ],
)
def test_an_error_names_the_place(messages, words):
    with pytest.raises(InvalidRequestError) as raised:
        chat_messages_of(messages, None)
    assert words in str(raised.value)
