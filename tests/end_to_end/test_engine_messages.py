"""The asyncio client and what its engine says: deaths, returns, late words and strange answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import msgspec
import pytest

from paxkv.client import async_client
from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.sampling_params import BeamSearchParams
from paxkv.contracts.engine_output import (
    EngineCoreOutput,
    EngineDead,
    SchedulerStats,
    StepOutputs,
    UtilityReply,
)
from paxkv.contracts.engine_request import AbortRequests, AddRequest, Shutdown, UtilityCall
from paxkv.contracts.request_output import RequestOutput
from paxkv.errors import EngineDeadError, InvalidRequestError, PaxkvError
from paxkv.text.tokenizer import LONG_TEXT_CHARS
from tests.paxkv.client.fake_replicas import FakeReplica, ready_engine
from tests.paxkv.client.test_async_client import INFO, LONG, collect, in_loop
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer


def make_client(engine: FakeReplica) -> AsyncEngineClient:
    tokenizer = byte_level_tokenizer()
    inputs = InputProcessor(
        tokenizer=tokenizer,
        vocab_size=300,
        max_model_len=2 * LONG_TEXT_CHARS,
        max_fitting_tokens=2 * LONG_TEXT_CHARS,
    )
    return AsyncEngineClient(engine, inputs, OutputProcessor(tokenizer), INFO, tokenizer=tokenizer)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[tuple[AsyncEngineClient, FakeReplica]]:
    engine = FakeReplica()
    client = make_client(engine)
    start = asyncio.create_task(client.start())
    await answer(engine, msgspec.json.encode(SchedulerStats(num_blocks=10)).decode())
    await start
    try:
        yield client, engine
    finally:
        engine.say(EngineDead(reason="the test is over"))
        await client.close(drain_timeout_s=0)


async def answer(engine: FakeReplica, result: str | None, error: str | None = None) -> UtilityCall:
    """Answers the one call that waits, which it returns."""
    await asyncio.sleep(0)
    (call,) = engine.take(UtilityCall)
    engine.say(UtilityReply(call_id=call.call_id, result_json=result, error=error))
    return call


async def send(
    client: AsyncEngineClient, engine: FakeReplica, request_id: str, **more: object
) -> tuple[asyncio.Task[list[RequestOutput]], str]:
    """Runs a request; returns it and its id in the engine."""
    task = asyncio.create_task(collect(client, "abc", LONG, request_id, **more))
    await asyncio.sleep(0)
    (added,) = engine.take(AddRequest)
    return task, added.request.request_id


def step(*engine_ids: str, finish_reason: str | None = "length", **stats: int) -> StepOutputs:
    """Every request gets the token of "a"."""
    return StepOutputs(
        outputs=[
            EngineCoreOutput(request_id=i, new_token_ids=[97], finish_reason=finish_reason)
            for i in engine_ids
        ],
        stats=SchedulerStats(**stats),
        timestamp=0.0,
        monotonic_s=0.0,
    )


@in_loop
async def test_requests_of_one_engine_of_several_end_and_the_others_go_on() -> None:
    async with running() as (client, engine):
        (broken, broken_id), (whole, whole_id) = [
            await send(client, engine, name) for name in ("broken", "whole")
        ]
        dead = EngineDead(reason="boom", retry_after_s=1, request_ids=(broken_id, "unknown"))
        engine.say(dead)
        with pytest.raises(EngineDeadError, match="boom.*Others go on") as raised:
            await broken
        assert raised.value.retry_after_s == 1
        # Parts of it may be with the others.
        assert [m.request_ids for m in engine.take(AbortRequests)] == [[broken_id]]
        assert client.is_alive and client.num_unfinished_requests == 1
        engine.say(step(whole_id))
        assert [o.outputs[0].text for o in await whole] == ["a"]


@in_loop
async def test_restarted_engine_serves_and_late_messages_of_the_dead_one_are_ignored() -> None:
    async with running() as (client, engine):
        task, first_id = await send(client, engine, "r")
        call = asyncio.create_task(client.stop_profile())
        await asyncio.sleep(0)
        engine.say(step(num_running_reqs=1, num_steps=4))
        engine.sent.clear()
        engine.say(EngineDead(reason="boom.", retry_after_s=7))
        for ended in (task, call, client.get_stats(), collect(client, "abc", LONG, "late")):
            with pytest.raises(EngineDeadError, match=r"boom\. Another is being") as raised:
                await ended
            assert raised.value.retry_after_s == 7
        assert not client.is_alive and client.num_unfinished_requests == 0
        # Only the message to end abandoned requests, in case it is one of several engines.
        assert [type(message) for message in engine.sent] == [AbortRequests]
        engine.say(step(first_id, num_steps=5))
        stats = client.latest_stats
        assert (stats.num_running_reqs, stats.num_steps) == (0, 4)
        ready = ready_engine(start_time=9.0)
        engine.say(ready)
        assert client.is_alive and client.latest_stats == ready.stats
        task, second_id = await send(client, engine, "r")
        # The engine's ids are never used twice.
        assert second_id != first_id
        engine.say(step(second_id))
        assert [o.outputs[0].text for o in await task] == ["a"]
        waiting = asyncio.create_task(client.wait_until_ended())
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.say(EngineDead(reason="for good"))
        assert await waiting == "for good"


@in_loop
async def test_answers_to_abandoned_calls_are_ignored() -> None:
    async with running() as (client, engine):
        call = asyncio.create_task(client.get_stats())
        await asyncio.sleep(0)
        call.cancel()
        await answer(engine, "{}")
        await asyncio.gather(call, return_exceptions=True)
        engine.say(UtilityReply(call_id=1, result_json="{}"))
        assert client.is_alive
        # And one that says no is the caller's to hear.
        call = asyncio.create_task(client.reset_prefix_cache(reset_running_requests=True))
        asked = await answer(engine, None, "unknown")
        assert (asked.method, asked.arguments) == ("reset_prefix_cache", (True,))
        with pytest.raises(PaxkvError, match="the engine answered: unknown"):
            await call
        assert client.is_alive


@in_loop
async def test_a_request_that_is_aborted_before_it_is_sent_ends_all_the_same() -> None:
    async with running() as (client, engine):
        task = asyncio.create_task(collect(client, "a" * (LONG_TEXT_CHARS + 1), LONG, "r"))
        await asyncio.sleep(0)
        await client.abort("r")
        (output,) = await task
        assert output.outputs[0].finish_reason == "abort"
        added, aborted = engine.sent
        assert aborted == AbortRequests(request_ids=[added.request.request_id])


@in_loop
async def test_a_search_that_is_aborted_takes_no_further_step() -> None:
    async with running() as (client, engine):
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        search = client.beam_search("ab", params, request_id="r")
        task = asyncio.create_task(anext(search))
        await asyncio.sleep(0)
        await client.abort("r")
        output = await task
        assert {c.finish_reason for c in output.outputs} <= {"abort"} and output.finished
        assert [type(message) for message in engine.sent].count(AddRequest) == 1


@in_loop
async def test_misses_of_this_engines_latest_requests_are_explained() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_client, "MAX_LATEST_REQUESTS", 2)
        async with running() as (client, engine):
            for name in ("a", "b", "a", "c"):
                task, engine_id = await send(client, engine, name)
                engine.say(step(engine_id))
                await task
            # "a" came again after "b".
            with pytest.raises(InvalidRequestError, match="'b' is not among the last 2"):
                await client.explain_prefix_cache_miss("b")
            asking = asyncio.create_task(client.explain_prefix_cache_miss("a"))
            call = await answer(engine, None, "it knows no more")
            assert call.arguments[0].startswith("a-")
            with pytest.raises(PaxkvError, match="it knows no more"):
                await asking
            engine.say(EngineDead(reason="boom", retry_after_s=1))
            engine.say(ready_engine())
            with pytest.raises(InvalidRequestError):
                await client.explain_prefix_cache_miss("a")


@in_loop
async def test_a_client_that_was_not_started_says_so() -> None:
    client = make_client(FakeReplica())
    for ended in (client.get_stats(), collect(client, "abc", LONG, "r")):
        with pytest.raises(EngineDeadError, match="not started"):
            await ended
    assert not client.is_alive
    # And waits for nothing.
    await asyncio.wait_for(client.close(drain_timeout_s=60), 30)


@in_loop
async def test_only_an_engine_that_lives_is_asked_to_drain() -> None:
    for drain_timeout_s, is_dead in ((30.0, False), (0.0, False), (30.0, True)):
        async with running() as (client, engine):
            if is_dead:
                engine.say(EngineDead(reason="boom"))
            closing = asyncio.create_task(client.close(drain_timeout_s=drain_timeout_s))
            await asyncio.sleep(0)
            is_asked = drain_timeout_s > 0 and not is_dead
            assert engine.take(Shutdown) == [Shutdown(drain=True)] * is_asked
            engine.say(EngineDead(reason="it was shut down"))
            await closing


@in_loop
async def test_close_waits_for_the_engines_last_words() -> None:
    async with running() as (client, engine):
        task, _ = await send(client, engine, "r")
        loop, dead = asyncio.get_running_loop(), EngineDead(reason="that was all")
        engine.close = lambda: loop.call_soon_threadsafe(loop.call_later, 0.1, engine.say, dead)
        await client.close(drain_timeout_s=0)
        assert await asyncio.wait_for(client.wait_until_ended(), 0.01) == "that was all"
        with pytest.raises(EngineDeadError, match="that was all"):
            await task


@in_loop
async def test_inspector_is_answered_as_it_asked() -> None:
    async with running() as (client, engine):
        asking = asyncio.create_task(client.inspect(5, True, keeps_tokens=False))
        call = await answer(engine, '{"a": 1}')
        assert (call.method, call.arguments) == ("inspect", (5, True, False))
        assert await asking == '{"a": 1}'


@in_loop
async def test_running_requests_are_preempted_only_if_that_is_asked_for() -> None:
    async with running() as (client, engine):
        asking = asyncio.create_task(client.reset_prefix_cache())
        assert (await answer(engine, "false")).arguments == (False,)
        assert await asking is False


@in_loop
async def test_close_ends_what_checks_grammars() -> None:
    async with running() as (client, engine):
        ended = []
        client._grammar_threads.close = lambda: ended.append("threads")
        checker = SimpleNamespace(close=lambda: ended.append("process"))
        client._input_processor._grammar_checker = checker
        engine.say(EngineDead(reason="boom"))
        await client.close(drain_timeout_s=0)
        assert sorted(ended) == ["process", "threads"]
