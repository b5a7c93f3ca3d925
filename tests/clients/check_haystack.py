"""Haystack's OpenAI generator: `python check_haystack.py URL`; see `tests/clients/run.sh`."""

import importlib.metadata
import sys
from typing import Literal

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

QUESTION = ChatMessage.from_user("What is 23 + 58?")
# Few values, because the small demo model would write digits until it is cut off.
Number = Literal[7, 23, 8, 58]


def add(a: Number, b: Number) -> int:
    """Adds two numbers."""
    return a + b


def main(url: str) -> None:
    server = {
        "api_key": Secret.from_token("client-key"),
        "model": "paxkv-demo",
        "api_base_url": f"{url}/v1",
        "generation_kwargs": {"temperature": 0, "max_tokens": 64},
        "max_retries": 0,
    }
    (answer,) = OpenAIChatGenerator(**server).run([QUESTION])["replies"]
    assert "81" in answer.text
    parts: list[str] = []
    streaming = OpenAIChatGenerator(**server, streaming_callback=lambda c: parts.append(c.content))
    (streamed,) = streaming.run([QUESTION])["replies"]
    assert streamed.text == answer.text == "".join(parts) and len(parts) > 1

    tool = create_tool_from_function(add)
    tooled = OpenAIChatGenerator(**server, tools=[tool])
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    (called,) = tooled.run([QUESTION], generation_kwargs=forced)["replies"]
    call = called.tool_calls[0]
    result = ChatMessage.from_tool(str(tool.invoke(**call.arguments)), origin=call)
    (last,) = tooled.run([QUESTION, called, result])["replies"]
    assert last.text and not last.tool_calls
    version = importlib.metadata.version("haystack-ai")
    print(f"ok  haystack-ai {version}: {answer.text!r}, add({call.arguments}), then {last.text!r}")


if __name__ == "__main__":
    main(sys.argv[1])
