"""Tool parsers by their names in `--tool-call-parser`, which are vLLM's."""

from collections.abc import Callable, Mapping

from paxkv.text.tool_parsers.hermes import HermesToolParser
from paxkv.text.tool_parsers.llama3_json import Llama3JsonToolParser
from paxkv.text.tool_parsers.tool_parser import ToolParser

TOOL_PARSERS: Mapping[str, Callable[[], ToolParser]] = {
    "hermes": HermesToolParser,
    "llama3_json": Llama3JsonToolParser,
}
