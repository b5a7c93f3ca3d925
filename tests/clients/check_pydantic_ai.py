"""pydantic-ai: `python check_pydantic_ai.py URL`; `tests/clients/run.sh` sets both up."""

import asyncio
import importlib.metadata
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is 23 + 58?"
# Few values, because the small demo model would write digits until it is cut off.
Number = Literal[7, 23, 8, 58]


class Terms(BaseModel):
    """The numbers of a sum."""

    a: Number
    b: Number


async def main(url: str) -> None:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="client-key")
    settings = {"temperature": 0, "max_tokens": 64}
    model = OpenAIChatModel("paxkv-demo", provider=provider, settings=settings)
    agent = Agent(model)
    answer = (await agent.run(QUESTION)).output
    assert "81" in answer
    async with agent.run_stream(QUESTION) as run:
        parts = [part async for part in run.stream_text(delta=True, debounce_by=None)]
    assert len(parts) > 1 and "".join(parts) == answer

    # The answer is a forced call of a tool with these arguments.
    typed = Agent(model, output_type=Terms)
    terms = (await typed.run(QUESTION)).output
    async with typed.run_stream(QUESTION) as run:
        assert await run.get_output() == terms

    # The model may call the tool or not; the request offers it.
    tooled = Agent(model)

    @tooled.tool_plain
    def add(a: Number, b: Number) -> int:
        """Adds two numbers."""
        return a + b

    with_tool = await tooled.run(QUESTION)
    assert with_tool.output
    version = importlib.metadata.version("pydantic-ai-slim")
    print(f"ok  pydantic-ai {version}: {answer!r}, {terms!r}, with a tool {with_tool.output!r}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
