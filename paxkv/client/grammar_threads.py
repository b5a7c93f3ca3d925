"""`GrammarThreads`: where requests wait while their grammars are compiled on trial."""

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable
from typing import TypeVar

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.protocols import GrammarChecker
from paxkv.errors import EngineDeadError

# Grammars that are compiled at once; the others of their kind wait for them. The quick ones share
# the processor, so that a small one has its turn beside those that will be given up.
MAX_QUICK_THREADS = 16
MAX_LONG_THREADS = 2
_ResultT = TypeVar("_ResultT")


class GrammarThreads:
    """Two lanes: each grammar is tried for a short time first, and those that need longer go on in
    a lane of their own. So a small grammar waits for no heavy one, however many there are.
    """

    def __init__(self) -> None:
        self._quick, self._long = (
            concurrent.futures.ThreadPoolExecutor(num, thread_name_prefix=f"paxkv-grammar-{name}")
            for name, num in (("quick", MAX_QUICK_THREADS), ("long", MAX_LONG_THREADS))
        )
        self._is_closed = False

    async def check(self, checker: GrammarChecker, params: StructuredOutputsParams) -> None:
        """Raises what `checker` raises.

        Raises:
            EngineDeadError: It was closed before a thread was free.
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
        """Runs nothing more; what has begun goes on to its end."""
        self._is_closed = True
        for pool in (self._quick, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
