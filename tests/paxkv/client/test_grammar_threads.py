"""Who waits for a grammar holds nobody else up, and hears of the end."""

import asyncio
import threading

import pytest

from paxkv.client.grammar_threads import MAX_LONG_THREADS, MAX_QUICK_THREADS, GrammarThreads
from paxkv.errors import EngineDeadError, InvalidRequestError
from paxkv.structured_outputs_params import StructuredOutputsParams

HEAVY, SMALL = (StructuredOutputsParams(regex=name) for name in ("heavy", "small"))


class SlowChecker:
    """Answers heavy grammars when the test wants, with a refusal; small ones at once."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.num_tried, self.num_begun = 0, 0

    def is_remembered(self, params):
        return False

    def check_quickly(self, params):
        self.num_tried += 1
        return params is SMALL

    def check(self, params):
        self.num_begun += 1
        assert self.may_answer.wait(20)
        raise InvalidRequestError("no grammar is good enough")

    def close(self):
        self.may_answer.set()

    async def wait_until_all_threads_are_taken(self, num_tried: int) -> None:
        while self.num_begun < MAX_LONG_THREADS or self.num_tried < num_tried:
            await asyncio.sleep(0.001)


class HeldChecker(SlowChecker):
    """Has no quick answers either."""

    def check_quickly(self, params):
        self.num_tried += 1
        assert self.may_answer.wait(20)
        return True


def test_a_small_grammar_waits_for_no_heavy_one():
    async def run():
        checker, threads = SlowChecker(), GrammarThreads()
        waiting = [asyncio.ensure_future(threads.check(checker, HEAVY)) for _ in range(40)]
        await asyncio.wait_for(checker.wait_until_all_threads_are_taken(40), 10)
        await asyncio.wait_for(threads.check(checker, SMALL), 10)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 10) == 7
        assert checker.num_begun == MAX_LONG_THREADS
        checker.may_answer.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, InvalidRequestError) for error in errors)
        threads.close()

    asyncio.run(run())


def test_no_more_grammars_than_have_threads_are_tried_at_once():
    async def run():
        checker, threads = HeldChecker(), GrammarThreads()
        waiting = [asyncio.ensure_future(threads.check(checker, SMALL)) for _ in range(20)]
        while checker.num_tried < MAX_QUICK_THREADS:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert checker.num_tried == MAX_QUICK_THREADS
        checker.may_answer.set()
        await asyncio.gather(*waiting)
        assert checker.num_tried == 20
        threads.close()

    asyncio.run(run())


def test_at_the_close_those_without_a_thread_hear_of_it():
    async def run():
        checker, threads = SlowChecker(), GrammarThreads()
        number = MAX_LONG_THREADS + 3
        waiting = [asyncio.ensure_future(threads.check(checker, HEAVY)) for _ in range(number)]
        await checker.wait_until_all_threads_are_taken(number)
        await asyncio.sleep(0.01)
        # Whoever left by himself is cancelled, as always.
        waiting[-1].cancel()
        threads.close()
        checker.may_answer.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [
            *[InvalidRequestError] * MAX_LONG_THREADS,
            *[EngineDeadError] * 2,
            asyncio.CancelledError,
        ]
        with pytest.raises(EngineDeadError):
            await threads.check(checker, SMALL)

    asyncio.run(run())
