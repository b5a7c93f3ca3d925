"""Messages are checked, and handed to the template in the one form that it knows."""

import pytest

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.chat_messages import MAX_CONTENT_PARTS, chat_messages

USER = {"role": "user", "content": "hi"}


def test_name_of_a_speaker_reaches_the_template_and_unknown_keys_do_not():
    messages = chat_messages([USER | {"name": "ann", "refusal": None, "x": 1}])
    assert messages == [USER | {"name": "ann"}]


def test_parts_of_text_have_one_form_whatever_they_were_called():
    content = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    (message,) = chat_messages([{"role": "user", "content": content}])
    assert message["content"] == [{"type": "text", "text": t} for t in "abc"]


def test_as_many_parts_as_are_allowed_may_be_given():
    content = ["a"] * MAX_CONTENT_PARTS
    (message,) = chat_messages([{"role": "user", "content": content}])
    assert len(message["content"]) == MAX_CONTENT_PARTS
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_CONTENT_PARTS}"):
        chat_messages([{"role": "user", "content": [*content, "a"]}])


def test_a_refusal_may_be_sent_back():
    content = [{"type": "refusal", "refusal": "no"}]
    (message,) = chat_messages([{"role": "assistant", "content": content}])
    assert message["content"] == [{"type": "text", "text": "no"}]


def test_a_turn_with_tools_comes_through():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = chat_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "assistant", "content": "so", "reasoning": "hm"},
        ]
    )
    assert messages[0]["content"] == ""
    assert messages[0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert messages[1] == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert messages[2]["reasoning"] == messages[2]["reasoning_content"] == "hm"


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_an_assistant_may_have_said_nothing(message):
    assert chat_messages([message]) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "tool", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "tool", "content": "a", "tool_call_id": 7}, "messages[0].tool_call_id"),
    ],
)
def test_a_message_that_cannot_be_used_is_named(message, param):
    with pytest.raises(InvalidRequestError) as raised:
        chat_messages([message])
    assert raised.value.param == param
