"""Who waits for a grammar holds nobody else up, and hears of the end."""

import asyncio
import threading

import pytest

from paxkv.client.grammar_threads import MAX_GRAMMAR_THREADS, GrammarThreads
from paxkv.errors import EngineDeadError, InvalidRequestError


class SlowCheck:
    """Takes as long as the test wants, and refuses then."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.num_begun = 0

    def __call__(self) -> None:
        self.num_begun += 1
        assert self.may_answer.wait(20)
        raise InvalidRequestError("no grammar is good enough")

    async def wait_until_all_threads_are_taken(self) -> None:
        while self.num_begun < MAX_GRAMMAR_THREADS:
            await asyncio.sleep(0.001)


def test_other_threads_are_free_meanwhile():
    async def run():
        check, threads = SlowCheck(), GrammarThreads()
        waiting = [asyncio.ensure_future(threads.run(check)) for _ in range(40)]
        await check.wait_until_all_threads_are_taken()
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 10) == 7
        assert check.num_begun == MAX_GRAMMAR_THREADS
        check.may_answer.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, InvalidRequestError) for error in errors)
        threads.close()

    asyncio.run(run())


def test_at_the_close_those_without_a_thread_hear_of_it():
    async def run():
        check, threads = SlowCheck(), GrammarThreads()
        number = MAX_GRAMMAR_THREADS + 3
        waiting = [asyncio.ensure_future(threads.run(check)) for _ in range(number)]
        await check.wait_until_all_threads_are_taken()
        # Whoever left by himself is cancelled, as always.
        waiting[-1].cancel()
        threads.close()
        check.may_answer.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [
            *[InvalidRequestError] * MAX_GRAMMAR_THREADS,
            *[EngineDeadError] * 2,
            asyncio.CancelledError,
        ]
        with pytest.raises(EngineDeadError):
            await threads.run(check)

    asyncio.run(run())
