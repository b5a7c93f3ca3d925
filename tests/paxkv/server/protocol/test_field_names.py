"""Errors name the fields that the client sent, on every route that a chat answers."""

import pytest

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.field_names import CHAT_NAMES
from tests.paxkv.server.fake_engine import GRAMMAR_FAILS
from tests.paxkv.structured_output.demo_grammars import make_compiler

BAD = {"type": "object", "properties": {"a": {"required": 5}}}
WORDS = "cannot be compiled: #/properties/a/required is 5; it must be a list of strings."
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BASES = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": HI},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 5},
}
# A tool that is ignored, and a good one, come first: errors count them too.
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def _tools(path, schema=BAD, **fields):
    tools = []
    for name, parameters in (("good", {"type": "object"}), ("bad", schema)):
        if path == MESSAGES:
            tools.append({"name": name, "input_schema": parameters})
        elif path == RESPONSES:
            tools.append({"type": "function", "name": name, "parameters": parameters})
        else:
            function = {"name": name, "parameters": parameters}
            tools.append({"type": "function", "function": function})
    tools[1] |= fields
    return {"tools": [SEARCH, *tools]}


def _post(server, path, fields):
    return server.client.post(path, json=BASES[path] | fields)


NAMED = {
    CHAT: {"type": "function", "function": {"name": "bad"}},
    RESPONSES: {"type": "function", "name": "bad"},
    MESSAGES: {"type": "tool", "name": "bad"},
}
ANY = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}
TOOL_FIELDS = {
    CHAT: "tools[2].function.parameters",
    RESPONSES: "tools[2].parameters",
    MESSAGES: "tools[2].input_schema",
}
JSON_SCHEMA = {"type": "json_schema", "name": "n", "schema": BAD}
FORMS = [
    (COMPLETIONS, {"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
        "response_format.json_schema.schema",
    ),
    (CHAT, {"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
    (RESPONSES, {"text": {"format": JSON_SCHEMA}}, "text.format.schema"),
    (MESSAGES, {"output_config": {"format": JSON_SCHEMA}}, "output_config.format.schema"),
    (MESSAGES, {"output_format": JSON_SCHEMA}, "output_format.schema"),
    *(
        (path, _tools(path) | {"tool_choice": choices[path]}, name)
        for path, name in TOOL_FIELDS.items()
        for choices in (NAMED, ANY)
    ),
]


@pytest.mark.parametrize(("path", "fields", "name"), FORMS)
def test_a_schema_that_cannot_be_compiled_is_named_as_it_was_sent(
    shared_server, path, fields, name
):
    assert _post(shared_server, path, fields).status_code == 200
    form = shared_server.engine.seen_params[-1].structured_outputs
    with pytest.raises(InvalidRequestError) as caught:
        make_compiler().check(form)
    subject = f'{name} (tool "bad")' if "tools" in fields else name
    assert str(caught.value) == f"{subject} {WORDS}"
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (RESPONSES, {"text": {"format": JSON_SCHEMA}}, "text.format.schema"),
        (CHAT, _tools(CHAT) | {"tool_choice": NAMED[CHAT]}, TOOL_FIELDS[CHAT]),
        (CHAT, _tools(CHAT) | {"tool_choice": "required"}, "tools"),
    ],
)
def test_a_grammar_that_fails_later_is_named_too(shared_server, path, fields, param):
    failing = [{"role": "user", "content": GRAMMAR_FAILS}]
    said = {
        COMPLETIONS: {"prompt": GRAMMAR_FAILS},
        CHAT: {"messages": failing},
        RESPONSES: {"input": GRAMMAR_FAILS},
    }
    response = _post(shared_server, path, fields | said[path])
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", TOOL_FIELDS)
def test_the_words_of_an_error_are_those_of_the_route(shared_server, path):
    strict = {} if path == CHAT else {"strict": 5}
    tools = _tools(path, **strict)
    if path == CHAT:
        tools["tools"][2]["function"]["strict"] = 5
    strict_name = "tools[2].function.strict" if path == CHAT else "tools[2].strict"
    kinds = {
        CHAT: "tools of type function",
        RESPONSES: "tools of type function",
        MESSAGES: "tools with a name and an input_schema",
    }
    cases = [
        ({"tool_choice": ANY[path]}, f"tool_choice needs {kinds[path]}; send some", "tool_choice"),
        (tools, f"{strict_name} must be true, false or null, got 5", strict_name),
    ]
    for fields, words, param in cases:
        response = _post(shared_server, path, fields)
        error = response.json()["error"]
        assert response.status_code == 400 and error["message"].startswith(words), error
        assert error.get("param", param) == param


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        (
            {"text": {"format": JSON_SCHEMA | {"strict": 5}}},
            "text.format.strict must be true, false or null",
            "text.format.strict",
        ),
        (
            {"text": {"format": JSON_SCHEMA}, "structured_outputs": {"regex": "a"}},
            "text.format and structured_outputs both",
            "structured_outputs",
        ),
        (
            _tools(RESPONSES, {"type": "array"}),
            "tools[2].parameters must be the schema of an object",
            "tools[2].parameters",
        ),
        (_tools(RESPONSES, name="a b"), 'tools[2] must be {"type": "function", "name"', "tools[2]"),
        (
            _tools(RESPONSES) | {"tool_choice": "some"},
            'tool_choice must be "none", "auto", "required" or {"type": "function", "name": "..."}',
            "tool_choice",
        ),
        (
            {"input": [{"type": "picture"}]},
            "input[0].type must be one of message, function_call, function_call_output, reasoning",
            "input[0].type",
        ),
        (
            {"input": [{"role": "function", "content": "a"}]},
            "input[0].role must be one of system, developer, user, assistant, tool, got",
            "input[0].role",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            'input[0].content[0] must be {"type": "input_text", "text": "..."}',
            "input[0].content[0]",
        ),
        (
            {"input": [{"type": "function_call", "name": 5}]},
            "input[0].name must be a string, got 5",
            "input[0].name",
        ),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort must be one of", "reasoning.effort"),
    ],
)
def test_responses_name_their_own_fields(shared_server, fields, words, param):
    error = _post(shared_server, RESPONSES, fields).json()["error"]
    assert error["message"].startswith(words) and error["param"] == param


def test_errors_of_the_prompt_name_the_field_with_the_conversation(shared_server):
    long = "a" * (shared_server.engine.model_info.max_model_len + 10)
    fields = {CHAT: {"messages": [{"role": "user", "content": long}]}, RESPONSES: {"input": long}}
    for path, param in ((CHAT, "messages"), (RESPONSES, "input")):
        error = _post(shared_server, path, fields[path]).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == param


def test_a_refusal_that_is_no_text_is_named_so(shared_server):
    messages = [*HI, {"role": "assistant", "refusal": 5}]
    error = _post(shared_server, CHAT, {"messages": messages}).json()["error"]
    assert error["message"].startswith("messages[1].refusal must be a string")
    assert error["param"] == "messages[1].refusal"


def test_tools_are_counted_as_in_the_request():
    tools = [{"type": "a"}, {"type": "b"}, {"type": "a"}, {"type": "c"}]
    names = CHAT_NAMES.with_tools(tools, lambda tool: tool["type"] == "a")
    assert [names.tool_path(k) for k in range(2)] == ["tools[1]", "tools[3]"]
    assert CHAT_NAMES.tool_path(1) == "tools[1]"
