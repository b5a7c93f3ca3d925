"""The OpenAI Agents SDK: `python check_openai_agents.py URL`; see `tests/clients/run.sh`."""

import asyncio
import importlib.metadata
import sys
from typing import Literal

import agents
from openai import AsyncOpenAI

QUESTION = "What is 23 + 58?"
# Few values, because the small demo model would write digits until it is cut off.
Number = Literal[7, 23, 8, 58]


@agents.function_tool
def add(a: Number, b: Number) -> int:
    """Adds two numbers."""
    return a + b


async def check(model: agents.Model) -> str:
    settings = agents.ModelSettings(temperature=0, max_tokens=64)
    agent = agents.Agent(name="plain", model=model, model_settings=settings)
    answer = (await agents.Runner.run(agent, QUESTION)).final_output
    assert "81" in answer
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    num_events = len([event async for event in streamed.stream_events()])
    assert streamed.final_output == answer and num_events > 3

    # The first turn must call the tool; then the SDK leaves it to the model.
    forced = agents.ModelSettings(
        temperature=0, max_tokens=64, tool_choice="required", parallel_tool_calls=False
    )
    tooled = agents.Agent(name="tooled", model=model, model_settings=forced, tools=[add])
    result = await agents.Runner.run(tooled, QUESTION)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
    return f"{answer!r}, then {result.new_items[1].output} and {result.final_output!r}"


async def main(url: str) -> None:
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="client-key", max_retries=0)
    version = importlib.metadata.version("openai-agents")
    for model_class in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        said = await check(model_class(model="paxkv-demo", openai_client=client))
        print(f"ok  openai-agents {version}, {model_class.__name__}: {said}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
