"""A forced call has the form of its function's parameters, whatever these refer to."""

import json

import pytest

from paxkv.config.engine_config import ServerConfig
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.openai_protocol import parse_chat
from paxkv.server.protocol.tool_choice import MAX_TOOLS, checked_tools, tool_use
from tests.paxkv.structured_output.demo_grammars import TOKENIZER, make_compiler

MESSAGES = [{"role": "user", "content": "hi"}]


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


def test_as_many_tools_as_are_allowed_may_be_given():
    tools = [_tool(f"t{i}") for i in range(MAX_TOOLS)]
    assert len(checked_tools(tools)) == MAX_TOOLS
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_TOOLS}"):
        checked_tools([*tools, _tool("more")])
