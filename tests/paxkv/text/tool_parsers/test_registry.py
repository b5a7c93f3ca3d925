"""Every parser that a flag can name is registered."""

import typing

from paxkv.config.server_config import ReasoningParserName, ToolCallParser
from paxkv.text.reasoning_parser import REASONING_PARSERS
from paxkv.text.tool_parsers.registry import TOOL_PARSERS


def test_flags_and_parsers_have_the_same_names():
    assert set(TOOL_PARSERS) == set(typing.get_args(ToolCallParser))
    assert set(REASONING_PARSERS) == set(typing.get_args(ReasoningParserName))
