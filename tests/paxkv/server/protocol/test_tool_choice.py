"""A forced call has the form of its function's parameters, whatever these refer to."""

import json

import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.ignored_parts import IgnoredParts, ignored_parts
from paxkv.server.protocol.openai_protocol import parse_chat
from paxkv.server.protocol.tool_choice import ToolUse, checked_tools, tool_use
from tests.paxkv.structured_output.demo_grammars import TOKENIZER, make_compiler

MESSAGES = [{"role": "user", "content": "hi"}]
AUTO = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")


def _tool(name, **parameters):
    schema = {"type": "object", "additionalProperties": False, **parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TREE = _tool(
    "tree",
    properties={"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    required=["child"],
)
OLD = _tool(
    "old",
    properties={"v": {"$ref": "#/definitions/V"}},
    required=["v"],
    definitions={"V": {"enum": ["q"]}},
)
# The same name for something else.
NEW = _tool(
    "new", properties={"v": {"$ref": "#/$defs/V"}}, required=["v"], **{"$defs": {"V": {"const": 1}}}
)
OTHER = _tool(
    "other",
    properties={"v": {"$ref": "#/$defs/V"}},
    required=["v"],
    **{"$defs": {"V": {"const": 2}}},
)


def _fits(calls):
    body = {"messages": MESSAGES, "tools": [TREE, OLD, NEW, OTHER], "tool_choice": "required"}
    schema = tool_use(parse_chat(body), ServerConfig()).schema
    matcher = make_compiler().compile(
        StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    )
    text = json.dumps(calls, separators=(",", ":"))
    return matcher.consume_tokens(TOKENIZER.encode(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "tree",
            {"child": {"child": None}},
            {"child": [{"name": "old", "parameters": {"v": "q"}}]},
        ),
        ("old", {"v": "q"}, {"v": "r"}),
        ("new", {"v": 1}, {"v": 2}),
        ("other", {"v": 2}, {"v": 1}),
    ],
)
def test_references_of_each_function_begin_at_its_own_parameters(name, good, bad):
    assert _fits([{"name": name, "parameters": good}])
    assert not _fits([{"name": name, "parameters": bad}])


def test_requests_may_have_hundreds_of_tools():
    tools = [_tool(f"t{i}") for i in range(259)]
    assert len(checked_tools(tools)) == 259
    use = tool_use(parse_chat({"messages": MESSAGES, "tools": tools}), AUTO)
    assert use.tools == tools


def test_tools_that_another_server_runs_are_ignored():
    search = {"type": "web_search", "search_context_size": "low"}
    tools = [search, OLD, {"type": "custom", "custom": {"name": "patch"}}]
    ignored = IgnoredParts()
    noted = ignored.names
    token = ignored_parts.set(ignored)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "old"}}):
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
        use = tool_use(parse_chat(body), AUTO)
        assert use.tools == [OLD]
        assert use.schema is None or "search" not in use.schema
    ignored_parts.reset(token)
    assert noted == ["tools of type web_search", "tools of type custom"]
    assert list(checked_tools(tools)) == ["old"]
    # Without any other tools, the answer is free text.
    assert tool_use(parse_chat({"messages": MESSAGES, "tools": [search]}), AUTO) == ToolUse()
    body = {"messages": MESSAGES, "tools": [search], "tool_choice": "required"}
    with pytest.raises(InvalidRequestError, match="needs tools of type function"):
        tool_use(parse_chat(body), AUTO)


@pytest.mark.parametrize(
    "tool", [{}, {"type": 5}, {"type": "function"}, {**OLD, "type": "functoin"}, {"name": "f"}]
)
def test_a_malformed_tool_is_refused_by_its_place(tool):
    with pytest.raises(InvalidRequestError, match=r"^tools\[1\] must be"):
        checked_tools([{"type": "web_search"}, tool])


def _schema_of(parameters, *, strict=None):
    function = {"name": "f", "strict": strict}
    if parameters != "none":
        function["parameters"] = parameters
    return checked_tools([{"type": "function", "function": function}])["f"]


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        ("none", NOTHING),
        (None, NOTHING),
        ({}, NOTHING),
        ({"type": "object"}, NOTHING),
        ({"type": "object", "properties": {}, "required": []}, NOTHING | {"required": []}),
        ({"type": "object", "title": "T"}, NOTHING | {"title": "T"}),
        ({"additionalProperties": {}}, {"type": "object", "additionalProperties": {}}),
        (
            {"type": "object", "additionalProperties": True},
            {"type": "object", "additionalProperties": True},
        ),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"type": ["null", "object"], "required": ["a"]}, {"type": "object", "required": ["a"]}),
        ({"type": None, "$ref": "#/$defs/A"}, {"type": "object", "$ref": "#/$defs/A"}),
        ({"anyOf": [{"required": ["a"]}]}, {"type": "object", "anyOf": [{"required": ["a"]}]}),
    ],
    ids=str,
)
def test_arguments_are_an_object_and_none_are_invented(parameters, schema):
    assert _schema_of(parameters) == schema


@pytest.mark.parametrize("kind", ["string", "None", ["array"], 5])
def test_parameters_that_are_no_object_are_refused(kind):
    with pytest.raises(
        InvalidRequestError, match=r"tools\[0\].function.parameters must be .* object"
    ):
        _schema_of({"type": kind})


def _fits_one(parameters, choice, text):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
    schema = tool_use(parse_chat(body), ServerConfig()).schema
    matcher = make_compiler().compile(
        StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    )
    return matcher.consume_tokens(TOKENIZER.encode(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"a":1}', "-4"),
        ({"anyOf": [{"required": ["a"]}, {"type": "integer"}]}, '{"a":1}', "-4"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"minProperties": 1}}}, '{"a":1}', "{}"),
        (None, "{}", '{"a":1}'),
    ],
    ids=str,
)
def test_a_forced_call_has_an_object_as_its_arguments(parameters, good, bad):
    named = {"type": "function", "function": {"name": "f"}}
    assert _fits_one(parameters, named, good)
    assert not _fits_one(parameters, named, bad)
    call = '[{"name":"f","parameters":%s}]'
    assert _fits_one(parameters, "required", call % good)
    assert not _fits_one(parameters, "required", call % bad)


def test_one_tool_with_an_unenforceable_keyword_leaves_the_others_as_they_are():
    tools = [_tool("f", properties={"a": {"not": {"const": 1}}}), OLD]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    schema = tool_use(parse_chat(body), ServerConfig()).schema
    assert make_compiler().check(StructuredOutputsParams(json=schema)) == (
        "tool:f#/properties/a/not",
    )
    tools[0]["function"]["strict"] = True
    use = tool_use(parse_chat(body), ServerConfig())
    with pytest.raises(InvalidRequestError, match="at #/properties/a/not;") as caught:
        make_compiler().check(use.form())
    assert str(caught.value).startswith('tools[0].function.parameters (tool "f") cannot')
    assert caught.value.param == "tools[0].function.parameters"


def test_strictness_beside_the_function_is_not_shown_to_the_model():
    body = {"messages": MESSAGES, "tools": [TREE | {"strict": True}], "tool_choice": "required"}
    use = tool_use(parse_chat(body), ServerConfig())
    assert use.tools == [TREE] and '"x-paxkv-strict":true' in use.schema


def test_strictness_is_a_boolean():
    with pytest.raises(InvalidRequestError, match=r"tools\[0\].function.strict must be") as caught:
        _schema_of({}, strict="yes")
    assert caught.value.param == "tools[0].function.strict"


def test_null_strictness_beside_the_function_leaves_that_of_the_function():
    tool = {"type": "function", "strict": None, "function": {"name": "f", "strict": True}}
    assert checked_tools([tool])["f"]["x-paxkv-strict"] is True
