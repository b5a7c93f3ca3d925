"""Runs a coroutine that SIGTERM cancels."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import TypeVar

from paxkv.entrypoints.command_end import Terminated

Result = TypeVar("Result")


def run_until_sigterm(work: Coroutine[object, object, Result]) -> Result:
    """`asyncio.run`, in which SIGTERM cancels the work.

    A handler that raises would do so in whatever the loop runs at that moment. What it meets there
    may keep the exception, and then nothing ends.

    Raises:
        Terminated: SIGTERM came, and the work has ended.
    """
    was_terminated = False

    async def run() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def end() -> None:
            nonlocal was_terminated
            was_terminated = True
            task.cancel()

        if threading.current_thread() is not threading.main_thread():
            return await work
        loop.add_signal_handler(signal.SIGTERM, end)
        try:
            return await work
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if was_terminated:
            raise Terminated from None
        raise
