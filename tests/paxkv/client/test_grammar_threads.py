"""Checks of grammars do not delay each other, and end when the client is closed."""

import asyncio
import threading

import pytest

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.grammar_threads import MAX_LONG_THREADS, MAX_QUICK_THREADS, GrammarThreads
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.engine_start import ModelInfo
from paxkv.engine.core_thread import CoreThread
from paxkv.errors import EngineDeadError, InvalidRequestError
from tests.paxkv.engine.fake_engine import make_engine_core
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer

HEAVY, SMALL = (StructuredOutputsParams(regex=name) for name in ("heavy", "small"))


class SlowChecker:
    """Accepts small grammars immediately; rejects heavy ones after `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.num_tried, self.num_begun = 0, 0

    def is_remembered(self, params):
        return False

    def is_heavy(self, params):
        return params is HEAVY

    def check_quickly(self, params):
        self.num_tried += 1
        return params is SMALL

    def check(self, params):
        self.num_begun += 1
        assert self.may_answer.wait(60)
        raise InvalidRequestError("no grammar is good enough")

    def close(self):
        self.may_answer.set()

    async def wait_until_all_threads_are_taken(self, num_tried: int) -> None:
        while self.num_begun < MAX_LONG_THREADS or self.num_tried < num_tried:
            await asyncio.sleep(0.001)


class HeldChecker(SlowChecker):
    """The quick check also waits for `may_answer`."""

    def check_quickly(self, params):
        self.num_tried += 1
        assert self.may_answer.wait(60)
        return True


def test_small_grammar_does_not_wait_for_heavy_ones():
    async def run():
        checker, threads = SlowChecker(), GrammarThreads()
        waiting = [asyncio.ensure_future(threads.check(checker, HEAVY)) for _ in range(40)]
        await asyncio.wait_for(checker.wait_until_all_threads_are_taken(40), 60)
        await asyncio.wait_for(threads.check(checker, SMALL), 60)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 60) == 7
        assert checker.num_begun == MAX_LONG_THREADS
        checker.may_answer.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, InvalidRequestError) for error in errors)
        threads.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_number_of_concurrent_checks_is_limited():
    async def run():
        checker, threads = HeldChecker(), GrammarThreads()
        waiting = [asyncio.ensure_future(threads.check(checker, SMALL)) for _ in range(40)]
        while checker.num_tried < MAX_QUICK_THREADS:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert checker.num_tried == MAX_QUICK_THREADS
        checker.may_answer.set()
        await asyncio.gather(*waiting)
        assert checker.num_tried == 40
        threads.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_close_ends_checks_that_wait_for_a_thread():
    async def run():
        checker, threads = SlowChecker(), GrammarThreads()

        def begin(number):
            return [asyncio.ensure_future(threads.check(checker, HEAVY)) for _ in range(number)]

        # In two groups, because of five concurrent checks any two may get the threads.
        waiting = begin(MAX_LONG_THREADS)
        await checker.wait_until_all_threads_are_taken(MAX_LONG_THREADS)
        waiting += begin(3)
        await checker.wait_until_all_threads_are_taken(MAX_LONG_THREADS + 3)
        while threads._long._work_queue.qsize() < 3:
            await asyncio.sleep(0.001)
        # A caller that cancels its check gets CancelledError.
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

    asyncio.run(asyncio.wait_for(run(), 60))


def test_check_of_a_request_does_not_compile_a_new_grammar():
    checker = SlowChecker()
    tokenizer = byte_level_tokenizer()
    numbers = {"max_model_len": 256, "vocab_size": 300, "max_fitting_tokens": 512}
    info = ModelInfo(
        served_model_name="fake",
        model="fake",
        created=0,
        max_num_seqs=8,
        cache_settings={"block_size": "16"},
        **numbers,
    )

    async def run():
        client = AsyncEngineClient(
            CoreThread(make_engine_core()),
            InputProcessor(tokenizer=tokenizer, grammar_checker=checker, **numbers),
            OutputProcessor(tokenizer),
            info,
        )
        await client.start()
        await asyncio.wait_for(client.check("a", SamplingParams(structured_outputs=HEAVY)), 60)
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            await client.check([], SamplingParams(structured_outputs=HEAVY))
        assert checker.num_tried == checker.num_begun == 0
        # `generate` checks the grammar, which is rejected.
        checker.may_answer.set()
        with pytest.raises(InvalidRequestError, match="good enough"):
            async for _ in client.generate(
                "a", SamplingParams(structured_outputs=HEAVY), request_id="r", stream=False
            ):
                pass
        await client.close(drain_timeout_s=0)

    asyncio.run(asyncio.wait_for(run(), 60))
