"""Fields of /v1/messages become fields of a chat, or are refused by their own names."""

import pytest

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.protocol.anthropic.request import parse_count_tokens, parse_messages
from paxkv.server.protocol.ignored_parts import IgnoredParts, ignored_parts

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "does it", "input_schema": {"properties": {"a": {}}}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def _chat(**fields):
    return parse_messages({"messages": HI, "max_tokens": 5} | fields)[1]


def test_fields_with_a_counterpart_become_fields_of_a_chat():
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stream": True, "cache_salt": "s"}
    chat = _chat(model="m", **given)
    assert {name: getattr(chat, name) for name in given} == given
    assert (chat.model, chat.max_tokens, chat.messages) == ("m", 5, HI)
    assert _chat(stop_sequences=["x", "y"]).stop == ["x", "y"]
    assert _chat(chat_template_kwargs={"a": 1}).chat_template_kwargs == {"a": 1}


def test_fields_that_change_no_answer_are_accepted():
    mark = {"type": "ephemeral"}
    chat = _chat(metadata={"user_id": "u"}, service_tier="auto", cache_control=mark, unknown=1)
    assert chat == _chat()


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": False},
            {"type": "function", "function": {"name": "f"}},
            True,
        ),
    ],
)
def test_tools_and_their_choice(choice, expected, is_parallel):
    chat = _chat(tools=[TOOL | {"type": "custom", "strict": True}], tool_choice=choice)
    assert chat.tools == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "does it",
                "parameters": {"type": "object", "properties": {"a": {}}},
            },
            "strict": True,
        }
    ]
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, is_parallel)


def test_reasoning_has_the_name_that_templates_use():
    for thinking, is_enabled in (
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "disabled"}, False),
    ):
        chat = _chat(thinking=thinking)
        assert chat.chat_template_kwargs == {"enable_thinking": is_enabled}
        assert chat.include_reasoning is True
    asked = {"enable_thinking": True}
    assert _chat(thinking={"type": "disabled"}, chat_template_kwargs=asked).chat_template_kwargs
    assert _chat(thinking={"type": "adaptive", "display": "omitted"}).include_reasoning is False


def test_the_output_format_and_the_effort_are_read():
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    chat = _chat(output_config={"format": form, "effort": "high"})
    assert chat.response_format == {"type": "json_schema", "json_schema": {"schema": schema}}
    assert chat.reasoning_effort == "high"
    # Its earlier name.
    assert _chat(output_format=form).response_format == chat.response_format


def test_the_answer_continues_the_assistants_last_message():
    begun = [*HI, {"role": "assistant", "content": "the answer is ("}]
    for chat in (_chat(messages=begun), parse_count_tokens({"messages": begun})[1]):
        assert chat.continue_final_message is True and chat.add_generation_prompt is False
    with pytest.raises(InvalidRequestError, match="tool_use blocks without results"):
        _chat(messages=[*HI, {"role": "assistant", "content": [CALL]}])


def test_a_count_reads_what_changes_the_prompt():
    fields = {
        "model": "m",
        "messages": HI,
        "system": "s",
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
    }
    counted, asked = parse_count_tokens(fields)[1], _chat(**fields)
    for name in ("model", "messages", "tools", "tool_choice", "chat_template_kwargs"):
        assert getattr(counted, name) == getattr(asked, name)
    with pytest.raises(UnsupportedFeatureError, match="inference_geo"):
        parse_count_tokens(fields | {"inference_geo": "us"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be in [1, "),
        ({"messages": "hi"}, "messages: expected array"),
        ({"system": 5}, "system: expected"),
        ({"system": [{"type": "image"}]}, "system[0].type must be one of text here"),
        ({"stop_sequences": "x"}, "stop_sequences: expected array"),
        ({"stop_sequences": [""]}, "stop_sequences must not contain an empty string"),
        ({"tools": [{"type": "x"}, {"name": "f"}]}, "tools[1].input_schema must be"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be a JSON schema, got None"),
        ({"tools": [TOOL | {"name": "f g"}]}, "tools[0].name must have 1 to 128 letters"),
        ({"tools": [TOOL | {"description": 1}]}, "tools[0].description must be a string"),
        ({"tool_choice": {"type": "tool"}}, 'tool_choice must be {"type": "auto"}, '),
        ({"tool_choice": {"type": "required"}}, "tool_choice must be"),
        ({"tool_choice": {"type": []}}, "tool_choice must be"),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use must be true or false",
        ),
        ({"thinking": {"type": "between_tools"}}, "thinking.type must be one of enabled, "),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must be"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "budget_tokens must be"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
            "input_schema.type must be 'object', got 'array'",
        ),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display must be one of"),
        ({"output_config": {"effort": "vast"}}, "output_config.effort must be one of low, "),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format must be"),
        ({"inference_geo": "eu"}, "inference_geo is not supported"),
        ({"output_format": {"type": "yaml"}}, "output_format must be"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params is not supported"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs is not supported"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields, words):
    with pytest.raises(InvalidRequestError) as raised:
        _chat(**fields)
    assert words in str(raised.value)


def test_values_that_ask_for_nothing_are_accepted():
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    for fields in (
        {"context_management": keep},
        {"speed": "standard"},
        {"mcp_servers": []},
        {"tools": None, "tool_choice": None, "system": None, "thinking": None},
    ):
        assert _chat(**fields) == _chat()


@pytest.fixture
def noted():
    """What the request that is being read has noted."""
    ignored = IgnoredParts()
    names = ignored.names
    token = ignored_parts.set(ignored)
    yield names
    ignored_parts.reset(token)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("betas", ["interleaved-thinking-2025-05-14", "made-up-2030-01-01"]),
        ("container", {"skills": []}),
        ("mcp_servers", [{"type": "url", "url": "https://a.org", "name": "a"}]),
        ("diagnostics", {"previous_message_id": "m"}),
        ("speed", "fast"),
    ],
)
def test_what_agents_send_with_every_request_is_ignored_and_noted(noted, name, value):
    assert _chat(**{name: value}) == _chat()
    assert noted == [name]
    assert parse_count_tokens({"messages": HI, name: value})[1].messages == HI


def test_tools_of_anthropics_server_are_ignored_and_noted(noted):
    server_tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "a"},
    ]
    chat = _chat(tools=[*server_tools, TOOL], tool_choice={"type": "auto"})
    assert [tool["function"]["name"] for tool in chat.tools] == ["f"]
    types = ("web_search_20250305", "bash_20250124", "mcp_toolset")
    assert noted == [f"tools of type {kind}" for kind in types]
    # Any type will do if the tool says what its input is.
    assert _chat(tools=[TOOL | {"type": "tool_of_2030"}]).tools == _chat(tools=[TOOL]).tools


def test_fields_for_when_and_by_whom_a_tool_is_called_are_ignored_and_reported(noted):
    fields = {"defer_loading": True, "allowed_callers": ["code"], "input_examples": [{"a": 1}]}
    assert _chat(tools=[TOOL | fields] * 2).tools == _chat(tools=[TOOL] * 2).tools
    assert sorted(noted) == sorted(f"{name} of tools" for name in fields)
    noted.clear()
    _chat(tools=[TOOL | {"defer_loading": False, "allowed_callers": ["direct"]}])
    assert noted == []


def test_requests_may_have_hundreds_of_tools():
    tools = [TOOL | {"name": f"mcp__{k}"} for k in range(259)]
    assert len(_chat(tools=tools).tools) == 259
