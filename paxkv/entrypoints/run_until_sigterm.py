"""Runs a coroutine that SIGTERM cancels."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import TypeVar

from paxkv.entrypoints.command_end import Terminated

Result = TypeVar("Result")


def run_until_sigterm(work: Coroutine[object, object, Result]) -> Result:
    """Runs the coroutine like `asyncio.run`, but SIGTERM cancels it.

    A signal handler that raises would interrupt any code that the loop runs at that moment. If
    that code catches the exception, the program would not end.

    Raises:
        Terminated: The process received SIGTERM, and the work has ended.
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
