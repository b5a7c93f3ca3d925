"""Prompts so long that the asyncio loop must not wait for their tokens."""

import asyncio
from collections.abc import Callable

from paxkv.client.input_processor import Prompt, text_of_prompt
from paxkv.contracts.engine_request import EngineRequest
from paxkv.text.tokenizer import LONG_TEXT_CHARS


async def run_beside_long_text(
    prompt: Prompt, process: Callable[[], EngineRequest]
) -> EngineRequest:
    """What `process` makes of a prompt, in a thread where that takes long."""
    text = text_of_prompt(prompt)
    # A megabyte takes seconds.
    if text is not None and len(text) > LONG_TEXT_CHARS:
        return await asyncio.to_thread(process)
    return process()
