"""Processes long prompts in a thread, so that the asyncio loop does not wait for the tokenizer."""

import asyncio
from collections.abc import Callable

from paxkv.client.input_processor import Prompt, text_of_prompt
from paxkv.contracts.engine_request import EngineRequest
from paxkv.text.tokenizer import LONG_TEXT_CHARS


async def process_in_thread_if_long(
    prompt: Prompt, process: Callable[[], EngineRequest]
) -> EngineRequest:
    """Returns the result of `process`, which it calls in a thread if the prompt's text is long."""
    text = text_of_prompt(prompt)
    if text is not None and len(text) > LONG_TEXT_CHARS:
        return await asyncio.to_thread(process)
    return process()
