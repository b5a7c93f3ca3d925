"""Messages are checked, and handed to the template in the one form that it knows."""

import pytest

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.chat.chat_messages import MAX_CONTENT_PARTS, chat_messages, content_text
from paxkv.server.protocol.json_body import MAX_PARTS
from paxkv.text.call_arguments import MAX_DEPTH, CallText

USER = {"role": "user", "content": "hi"}


def test_name_of_a_speaker_reaches_the_template_and_unknown_keys_do_not():
    messages = chat_messages([USER | {"name": "ann", "refusal": None, "x": 1}])
    assert messages == [USER | {"name": "ann"}]


def test_parts_of_text_have_one_form_whatever_they_were_called():
    content = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    (message,) = chat_messages([{"role": "user", "content": content}])
    assert message["content"] == [{"type": "text", "text": t} for t in "abc"]


def test_a_body_may_have_the_largest_allowed_number_of_parts():
    content = ["a"] * MAX_CONTENT_PARTS
    (message,) = chat_messages([{"role": "user", "content": content}])
    assert len(message["content"]) == MAX_CONTENT_PARTS
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_CONTENT_PARTS}"):
        chat_messages([{"role": "user", "content": [*content, "a"]}])


def test_a_refusal_may_be_sent_back():
    content = [{"type": "refusal", "refusal": "no"}]
    (message,) = chat_messages([{"role": "assistant", "content": content}])
    assert message["content"] == [{"type": "text", "text": "no"}]


def test_a_turn_with_tools_is_accepted():
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
    ("arguments", "shown"),
    [
        ('{"a": 1', '{"a": 1'),
        ('{"a": "one\ntwo"}', '{"a": "one\ntwo"}'),
        ('{"a": 1,}', '{"a": 1,}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ("[1]", "[1]"),
        ("null", "null"),
        ([1, {"b": "ü"}], '[1, {"b": "ü"}]'),
        (False, "false"),
    ],
)
def test_arguments_that_are_no_object_are_their_text(arguments, shown):
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = chat_messages([{"role": "assistant", "tool_calls": [call]}])
    found = message["tool_calls"][0]["function"]["arguments"]
    assert isinstance(found, CallText) and str(found) == shown


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_a_call_may_have_no_arguments(arguments):
    call = {"index": 0, "type": None, "function": {"name": "f", "arguments": arguments}}
    (message,) = chat_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]


def test_arguments_with_too_many_parts_for_a_body_are_text():
    call = {"function": {"name": "f", "arguments": '{"a": [' + "[]," * MAX_PARTS + "[]]}"}}
    (message,) = chat_messages([{"role": "assistant", "tool_calls": [call]}])
    assert isinstance(message["tool_calls"][0]["function"]["arguments"], CallText)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_null_is_an_empty_content(role):
    assert chat_messages([{"role": role, "content": None}]) == [{"role": role, "content": ""}]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"type": "text", "text": "a"}, [{"type": "text", "text": "a"}]),
        ({"id": 5, "ü": None}, '{"id": 5, "ü": null}'),
    ],
)
def test_an_object_is_a_part_or_data(role, content, expected):
    (message,) = chat_messages([{"role": role, "content": content}])
    assert message["content"] == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (5, "5"),
        (False, "false"),
        ([{"id": 5}, {"id": 6}], '[{"id": 5}, {"id": 6}]'),
        ({"type": "directory", "size": 5}, '{"type": "directory", "size": 5}'),
        (["a", "b"], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        ([], []),
    ],
)
def test_the_result_of_a_tool_may_be_data(content, expected):
    (message,) = chat_messages([{"role": "tool", "content": content}])
    assert message["content"] == expected


def test_data_that_templates_could_not_write_is_refused():
    content = {}
    for _ in range(MAX_DEPTH):
        content = {"a": content}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content may have at most 200"):
        chat_messages([{"role": "tool", "content": content}])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"text": "m"}]},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "reasoning", "text": "hm"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "reasoning_text", "text": "hm"},
    ],
)
def test_reasoning_parts_become_the_reasoning(part):
    text = {"type": "text", "text": "so"}
    secret = {"type": "redacted_thinking", "data": "gAAA"}
    (message,) = chat_messages([{"role": "assistant", "content": [part, secret, text]}])
    assert message["content"] == [text]
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert content_text([part, secret, text]) == "so"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize(
    "thoughts", [["h", "m"], [{"type": "text", "text": "hm"}], {"type": "thinking", "text": "hm"}]
)
def test_reasoning_may_have_parts(name, thoughts):
    (message,) = chat_messages([{"role": "assistant", "content": "so", name: thoughts}])
    assert message["reasoning"] == message["reasoning_content"] == "hm"


def test_thoughts_in_two_places_are_shown_once():
    parts = [{"type": "thinking", "thinking": "hm"}, "so"]
    (message,) = chat_messages([{"role": "assistant", "content": parts, "reasoning": "hm"}])
    assert message["reasoning"] == "hm"


def test_a_refusal_without_content_is_the_content():
    (message,) = chat_messages([{"role": "assistant", "content": None, "refusal": "no"}])
    assert message["content"] == "no"


def test_calls_of_functions_become_calls_of_tools():
    call = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": None},
        {"role": "assistant", "content": None, "function_call": call | {"arguments": "{"}},
        {"role": "function", "name": "f", "content": "2"},
    ]
    _, called, result, called_again, last = chat_messages(messages)
    assert called["tool_calls"] == [
        {"id": "call00001", "type": "function", "function": call | {"arguments": {"a": 1}}}
    ]
    assert result == {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": ""}
    assert str(called_again["tool_calls"][0]["function"]["arguments"]) == "{"
    assert last["tool_call_id"] == called_again["tool_calls"][0]["id"] == "call00003"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "tool", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": {"type": "image"}}, "messages[0].content[0]"),
        ({"role": "assistant", "reasoning": 5}, "messages[0].reasoning"),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": "a", "function_call": {}}, "messages[0].function_call"),
        ({"role": "assistant", "function_call": {}}, "messages[0].function_call"),
        (
            {"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [{}]},
            "messages[0].function_call",
        ),
        ({"role": "assistant", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "a", "tool_call_id": 7}, "messages[0].tool_call_id"),
    ],
)
def test_a_message_that_cannot_be_used_is_named(message, param):
    with pytest.raises(InvalidRequestError) as raised:
        chat_messages([message])
    assert raised.value.param == param
