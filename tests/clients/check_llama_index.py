"""LlamaIndex' `OpenAILike`: `python check_llama_index.py URL`; see `tests/clients/run.sh`."""

import importlib.metadata
import sys
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

QUESTION = ChatMessage(role="user", content="What is 23 + 58?")
# Few values, because the small demo model would write digits until it is cut off.
Number = Literal[7, 23, 8, 58]


def add(a: Number, b: Number) -> int:
    """Adds two numbers."""
    return a + b


def main(url: str) -> None:
    llm = OpenAILike(
        model="paxkv-demo",
        api_base=f"{url}/v1",
        api_key="client-key",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=64,
        max_retries=0,
    )
    answer = llm.chat([QUESTION]).message.content
    assert "81" in answer
    parts = [part.delta for part in llm.stream_chat([QUESTION])]
    assert len(parts) > 1 and "".join(part or "" for part in parts) == answer

    plain = OpenAILike(
        model="paxkv-demo", api_base=f"{url}/v1", api_key="client-key", temperature=0, max_tokens=8
    )
    whole = plain.complete("2 + 2 =").text
    assert "".join(part.delta for part in plain.stream_complete("2 + 2 =")) == whole

    tool = FunctionTool.from_defaults(add)
    asked = {"tools": [tool], "chat_history": [QUESTION], "tool_required": True}
    (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools(**asked))
    assert set(call.tool_kwargs) == {"a", "b"}
    *_, last = llm.stream_chat_with_tools(**asked)
    (streamed,) = llm.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs
    version = importlib.metadata.version("llama-index-llms-openai-like")
    print(f"ok  llama-index-llms-openai-like {version}: {answer!r}, add({call.tool_kwargs})")


if __name__ == "__main__":
    main(sys.argv[1])
