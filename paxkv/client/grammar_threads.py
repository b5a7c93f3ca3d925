"""`GrammarThreads`: where requests wait while their grammars are compiled on trial."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

from paxkv.errors import EngineDeadError

# Grammars that are compiled at once; the others wait for them.
MAX_GRAMMAR_THREADS = 4
_ResultT = TypeVar("_ResultT")


class GrammarThreads:
    """Threads of their own: those who wait for a bad grammar hold nobody else up."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(
            MAX_GRAMMAR_THREADS, thread_name_prefix="paxkv-grammar-check"
        )
        self._is_closed = False

    async def run(self, function: Callable[[], _ResultT]) -> _ResultT:
        """What `function` returns or raises.

        Raises:
            EngineDeadError: It was closed before a thread was free.
        """
        if self._is_closed:
            raise EngineDeadError("the engine is shutting down.")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise EngineDeadError("the engine is shutting down.") from None
            raise

    def close(self) -> None:
        """Runs nothing more; what has begun goes on to its end."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
