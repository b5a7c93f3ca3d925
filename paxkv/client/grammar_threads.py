"""`GrammarThreads`: test-compiles the grammars of requests in threads."""

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable
from typing import TypeVar

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.protocols import GrammarChecker
from paxkv.errors import EngineDeadError

# Grammars that each lane checks at the same time; others wait. The quick lane has many threads, so
# that small grammars make progress while large ones use up their short trial.
MAX_QUICK_THREADS = 16
MAX_LONG_THREADS = 2
_ResultT = TypeVar("_ResultT")


class GrammarThreads:
    """Two lanes of threads. Each grammar is first tried for a short time in the quick lane.

    Grammars that need longer move to the long lane, so a small grammar never waits for them.
    """

    def __init__(self) -> None:
        self._quick, self._long = (
            concurrent.futures.ThreadPoolExecutor(num, thread_name_prefix=f"paxkv-grammar-{name}")
            for name, num in (("quick", MAX_QUICK_THREADS), ("long", MAX_LONG_THREADS))
        )
        self._is_closed = False

    async def check(self, checker: GrammarChecker, params: StructuredOutputsParams) -> None:
        """Checks a grammar; passes on the checker's errors.

        Raises:
            EngineDeadError: `close` was called before a thread was free.
        """
        if not await self._run(self._quick, functools.partial(checker.check_quickly, params)):
            await self._run(self._long, functools.partial(checker.check, params))

    async def _run(
        self, pool: concurrent.futures.ThreadPoolExecutor, function: Callable[[], _ResultT]
    ) -> _ResultT:
        if self._is_closed:
            raise EngineDeadError("the engine is shutting down.")
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise EngineDeadError("the engine is shutting down.") from None
            raise

    def close(self) -> None:
        """Cancels all checks that have not started; running ones continue to their end."""
        self._is_closed = True
        for pool in (self._quick, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
