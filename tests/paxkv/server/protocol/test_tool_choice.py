"""A forced call has the form of its function's parameters, whatever these refer to."""

import json

import pytest

from paxkv.config.engine_config import ServerConfig
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.ignored_parts import ignored_parts
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


def test_agents_may_bring_hundreds_of_tools():
    tools = [_tool(f"t{i}") for i in range(259)]
    assert len(checked_tools(tools)) == 259
    use = tool_use(parse_chat({"messages": MESSAGES, "tools": tools}), AUTO)
    assert use.tools == tools


def test_tools_that_another_server_runs_are_ignored():
    search = {"type": "web_search", "search_context_size": "low"}
    tools = [search, OLD, {"type": "custom", "custom": {"name": "patch"}}]
    noted = []
    ignored_parts.set(noted)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "old"}}):
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
        use = tool_use(parse_chat(body), AUTO)
        assert use.tools == [OLD]
        assert use.schema is None or "search" not in use.schema
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
