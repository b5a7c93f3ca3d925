"""LangChain's `langchain-openai`: `python check_langchain.py URL`; see `tests/clients/run.sh`."""

import importlib.metadata
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "What is 23 + 58?"
# Few values, because the small demo model would write digits until it is cut off.
Number = Literal[7, 23, 8, 58]


@tool
def add(a: Number, b: Number) -> int:
    """Adds two numbers."""
    return a + b


class Terms(BaseModel):
    """The numbers of a sum."""

    a: Number
    b: Number


def main(url: str) -> None:
    server = {"base_url": f"{url}/v1", "api_key": "client-key", "model": "paxkv-demo"}
    chat = ChatOpenAI(**server, temperature=0, max_tokens=64)
    answer = chat.invoke(QUESTION)
    assert "81" in answer.content and answer.usage_metadata["output_tokens"] > 0
    parts = [part.content for part in chat.stream(QUESTION)]
    assert len(parts) > 1 and "".join(parts) == answer.content
    assert [a.content for a in chat.batch([QUESTION] * 3)] == [answer.content] * 3

    complete = OpenAI(**server, temperature=0, max_tokens=8)
    assert "".join(complete.stream("2 + 2 =")) == complete.invoke("2 + 2 =")

    terms = chat.with_structured_output(Terms, method="json_schema").invoke(QUESTION)
    assert isinstance(terms, Terms)

    forced = chat.bind_tools([add], tool_choice="add")
    called = forced.invoke(QUESTION)
    (call,) = called.tool_calls
    streamed = None
    for part in forced.stream(QUESTION):
        streamed = part if streamed is None else streamed + part
    assert streamed.tool_calls[0]["args"] == call["args"]
    result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
    last = chat.bind_tools([add]).invoke([HumanMessage(QUESTION), called, result])
    assert last.content and not last.tool_calls
    version = importlib.metadata.version("langchain-openai")
    print(f"ok  langchain-openai {version}: {answer.content!r}, {terms!r}, add({call['args']})")


if __name__ == "__main__":
    main(sys.argv[1])
