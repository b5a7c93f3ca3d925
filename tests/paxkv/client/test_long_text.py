"""Long prompts are processed in a thread, short ones on the loop."""

import asyncio
import threading

import pytest

from paxkv.client.long_text import process_in_thread_if_long
from paxkv.text.tokenizer import LONG_TEXT_CHARS


@pytest.mark.parametrize(
    ("prompt", "is_in_thread"),
    [
        ("a" * (LONG_TEXT_CHARS + 1), True),
        ("a" * LONG_TEXT_CHARS, False),
        ([1] * (LONG_TEXT_CHARS + 1), False),
    ],
    ids=["long text", "text", "token ids"],
)
def test_only_long_texts_are_processed_in_a_thread(prompt, is_in_thread):
    async def thread_of_process() -> threading.Thread:
        return await process_in_thread_if_long(prompt, threading.current_thread)

    thread = asyncio.run(thread_of_process())
    assert (thread is not threading.current_thread()) == is_in_thread
