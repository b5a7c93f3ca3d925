"""The asyncio client over a real engine core with a fake executor."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest

from paxkv.client import output_stream, request_streams
from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_request import AddRequest
from paxkv.contracts.engine_start import ModelInfo
from paxkv.contracts.request_output import RequestOutput
from paxkv.engine.core_thread import CoreThread
from paxkv.errors import (
    EngineDeadError,
    ForkedProcessError,
    InvalidRequestError,
    InvariantError,
    PromptTooLongError,
    SlowReaderError,
)
from paxkv.text.tokenizer import LONG_TEXT_CHARS
from tests.paxkv.engine.fake_engine import make_engine_core
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer

INFO = ModelInfo(
    served_model_name="fake",
    model="fake",
    max_model_len=256,
    vocab_size=300,
    max_fitting_tokens=512,
    created=0,
    max_num_seqs=8,
    cache_settings={"block_size": "16"},
)
LONG = SamplingParams(max_tokens=250)


@contextlib.asynccontextmanager
async def running(**arguments: object) -> AsyncIterator[AsyncEngineClient]:
    tokenizer = byte_level_tokenizer()
    client = AsyncEngineClient(
        CoreThread(make_engine_core(**arguments)),
        InputProcessor(
            tokenizer=tokenizer, vocab_size=300, max_model_len=256, max_fitting_tokens=512
        ),
        OutputProcessor(tokenizer),
        INFO,
        tokenizer=tokenizer,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.close(drain_timeout_s=0)


def in_loop(test: Callable[[], Coroutine]) -> Callable[[], None]:
    """Runs an async test without a plugin."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 120))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def collect(
    client: AsyncEngineClient, prompt: object, params: SamplingParams, request_id: str, **more
) -> list[RequestOutput]:
    more.setdefault("stream", True)
    generated = client.generate(prompt, params, request_id=request_id, **more)
    return [output async for output in generated]


async def until_idle(client: AsyncEngineClient) -> None:
    """Waits until the engine has no request; the time limit is that of the test."""
    while (stats := await client.get_stats()).num_running_reqs or stats.num_waiting_reqs:
        await asyncio.sleep(0.01)
    assert stats.kv_cache_usage == 0.0


@in_loop
async def test_stream_yields_deltas_and_ends_with_a_finish_reason() -> None:
    async with running() as client:
        outputs = await collect(client, "abc", SamplingParams(max_tokens=5), "r")
        # Deltas that arrive while this loop is busy are merged.
        assert "".join(o.outputs[0].text for o in outputs) == "abcab"
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert {o.request_id for o in outputs} == {"r"}
        assert outputs[0].prompt == "abc"


@in_loop
async def test_without_stream_there_is_one_output() -> None:
    async with running() as client:
        (output,) = await collect(client, "abc", SamplingParams(max_tokens=5), "r", stream=False)
        assert output.outputs[0].text == "abcab"


@in_loop
async def test_fifty_concurrent_requests_get_their_own_outputs() -> None:
    async with running() as client:
        params = SamplingParams(max_tokens=40)
        prompts = [f"<{number}>" for number in range(50)]
        results = await asyncio.gather(
            *(
                collect(client, prompt, params, prompt, stream=number % 2 == 0)
                for number, prompt in enumerate(prompts)
            )
        )
        for prompt, outputs in zip(prompts, results, strict=True):
            assert "".join(o.outputs[0].text for o in outputs) == (prompt * 40)[:40]
        assert client.num_unfinished_requests == 0
        await until_idle(client)


@in_loop
async def test_closing_the_iterator_aborts_the_request_in_the_engine() -> None:
    async with running(step_s=0.05) as client:
        generated = client.generate("abc", LONG, request_id="r", stream=True)
        async for _ in generated:
            break
        assert (await client.get_stats()).num_running_reqs == 1
        await generated.aclose()
        await until_idle(client)
        assert client.num_unfinished_requests == 0


@in_loop
async def test_cancelling_the_task_aborts_the_request_in_the_engine() -> None:
    async with running(step_s=0.05) as client:
        for stream in (True, False):
            task = asyncio.create_task(collect(client, "abc", LONG, "r", stream=stream))
            while not (await client.get_stats()).num_running_reqs:
                await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until_idle(client)


@in_loop
async def test_finished_request_is_not_aborted_in_the_engine() -> None:
    async with running() as client:
        sent = []
        send = client._transport.send
        client._transport.send = lambda message: (sent.append(message), send(message))
        await collect(client, "abc", SamplingParams(max_tokens=2), "r")
        assert [type(message).__name__ for message in sent] == ["AddRequest"]
        await collect(client, "abc", SamplingParams(max_tokens=99, stop="c"), "r")
        names = [type(message).__name__ for message in sent]
        assert names == ["AddRequest", "AddRequest", "AbortRequests"]


@in_loop
async def test_abort_by_id_ends_the_iterator_with_a_last_output() -> None:
    async with running(step_s=0.05) as client:
        task = asyncio.create_task(collect(client, "abc", LONG, "r", stream=False))
        while not (await client.get_stats()).num_running_reqs:
            await asyncio.sleep(0.01)
        await client.abort("r")
        await client.abort("unknown")
        (output,) = await task
        assert output.outputs[0].finish_reason == "abort"
        await until_idle(client)


@in_loop
async def test_id_of_an_aborted_request_can_be_reused_immediately() -> None:
    async with running(step_s=0.05) as client:
        for _ in range(5):
            generated = client.generate("abc", LONG, request_id="r", stream=True)
            await anext(generated)
            await generated.aclose()
        outputs = await collect(client, "xyz", SamplingParams(max_tokens=6), "r")
        assert "".join(o.outputs[0].text for o in outputs) == "xyzxyz"


@in_loop
async def test_invalid_requests_raise_before_the_first_output() -> None:
    async with running(step_s=0.05) as client:
        with pytest.raises(PromptTooLongError):
            await collect(client, "x" * 300, SamplingParams(), "r")
        # Tokenised in a worker thread.
        with pytest.raises(PromptTooLongError):
            await collect(client, "x" * (LONG_TEXT_CHARS + 1), SamplingParams(), "r")
        generated = client.generate("abc", LONG, request_id="r", stream=True)
        await anext(generated)
        with pytest.raises(InvalidRequestError, match="in use"):
            await collect(client, "abc", LONG, "r")
        # The rejected request did not end the running request with the same id.
        await anext(generated)
        await generated.aclose()


@in_loop
async def test_dead_engine_ends_every_request() -> None:
    async with running(fails_at_step=3) as client:
        tasks = [
            asyncio.create_task(collect(client, "abc", LONG, str(number), stream=number % 2 == 0))
            for number in range(10)
        ]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "on fire" in str(result)
        assert not client.is_alive
        with pytest.raises(EngineDeadError):
            await collect(client, "abc", LONG, "late")
        with pytest.raises(EngineDeadError):
            await client.get_stats()
        assert client.num_unfinished_requests == 0


@in_loop
async def test_step_that_cannot_be_processed_ends_every_request() -> None:
    async with running(step_s=0.05) as client:
        tasks = [asyncio.create_task(collect(client, "abc", LONG, str(n))) for n in range(3)]
        while (await client.get_stats()).num_running_reqs < 3:
            await asyncio.sleep(0.01)

        def fail(step_outputs: object) -> None:
            raise RuntimeError("no such token")

        client._output_processor.process = fail
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "no such token" in str(result)
        assert not client.is_alive
        assert client.num_unfinished_requests == 0


@in_loop
async def test_failed_detokenization_ends_only_its_request() -> None:
    async with running(step_s=0.02) as client:
        tasks = [asyncio.create_task(collect(client, "abc", LONG, str(n))) for n in range(3)]
        several = dataclasses.replace(LONG, n=3)
        tasks.append(asyncio.create_task(collect(client, "abc", several, "3", stream=False)))
        while (await client.get_stats()).num_running_reqs < 6:
            await asyncio.sleep(0.01)

        def fail(output: object, now_s: float) -> None:
            raise RuntimeError("no such token")

        for engine_id, state in client._output_processor._completions.items():
            if engine_id.startswith(("1-", "1_3-")):
                state.process = fail
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for broken in (results[1], results[3]):
            assert isinstance(broken, InvariantError) and "no such token" in str(broken)
        for whole in (results[0], results[2]):
            assert whole[-1].outputs[0].finish_reason == "length"
        # No part of the broken ones is left.
        await until_idle(client)
        assert client._output_processor._completions == {}
        assert client.is_alive and client.num_unfinished_requests == 0


@in_loop
async def test_abort_reaches_the_engine_if_building_the_last_output_fails() -> None:
    async with running(step_s=0.05) as client:
        task = asyncio.create_task(collect(client, "abc", LONG, "0"))
        while not (await client.get_stats()).num_running_reqs:
            await asyncio.sleep(0.01)

        def fail() -> None:
            raise RuntimeError("no such token")

        (state,) = client._output_processor._completions.values()
        state.abort = fail
        await client.abort("0")
        with pytest.raises(InvariantError, match="no such token"):
            await task
        await until_idle(client)


@in_loop
async def test_unreadable_message_ends_every_request() -> None:
    async with running(step_s=0.05) as client:
        tasks = [asyncio.create_task(collect(client, "abc", LONG, str(n))) for n in range(3)]
        while (await client.get_stats()).num_running_reqs < 3:
            await asyncio.sleep(0.01)

        def fail(timeout_s: float | None = None) -> None:
            raise InvariantError("not a message of this version")

        client._transport.receive = fail
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "not a message" in str(result)
        assert not client.is_alive


@in_loop
async def test_too_slow_reader_is_ended_and_aborted_in_the_engine() -> None:
    async with running() as client:
        with pytest.MonkeyPatch.context() as patch:
            for module in (request_streams, output_stream):
                patch.setattr(module, "MAX_WAITING_BYTES", 400)
            patch.setattr(output_stream, "_MAX_PIECE_BYTES", 100)
            slow = client.generate("abc", LONG, request_id="slow", stream=True)
            await anext(slow)
            # The slow reader stops reading; another request continues.
            await collect(client, "abc", LONG, "other")
            await until_idle(client)
            with pytest.raises(SlowReaderError, match="Read the stream faster"):
                async for _ in slow:
                    pass
        assert client.num_unfinished_requests == 0


@in_loop
async def test_slow_reader_with_most_waiting_bytes_is_ended() -> None:
    async with running(max_num_seqs=4) as client:
        client._streams.waiting_budget.max_bytes = 4000
        slow = client.generate("abc", LONG, request_id="slow", stream=True)
        few = SamplingParams(max_tokens=8, ignore_eos=True)
        behind = client.generate("abcd", few, request_id="behind", stream=True)
        # The first output may have all tokens of a short answer.
        read = {reader: [await anext(reader)] for reader in (behind, slow)}
        await until_idle(client)
        assert 0 < client._streams.waiting_budget.num_bytes <= 4000
        # Alone, the slow reader is below the limit; with another one, it exceeds the limit.
        other = client.generate("abcde", LONG, request_id="other", stream=True)
        read[other] = [await anext(other)]
        await until_idle(client)
        assert 0 < client._streams.waiting_budget.num_bytes <= 4000
        with pytest.raises(SlowReaderError, match="larger --max-unread-bytes"):
            async for _ in slow:
                pass
        for reader in (behind, other):
            read[reader] += [output async for output in reader]
            assert read[reader][-1].finished
        assert client._streams.waiting_budget.num_bytes == 0


@in_loop
async def test_unread_bytes_of_a_closed_stream_do_not_count() -> None:
    async with running() as client:
        left = client.generate("abc", LONG, request_id="left", stream=True)
        await anext(left)
        await until_idle(client)
        assert client._streams.waiting_budget.num_bytes > 0
        await left.aclose()
        assert client._streams.waiting_budget.num_bytes == 0


@in_loop
async def test_stats_and_reset_come_from_the_engine() -> None:
    async with running() as client:
        assert client.latest_stats.num_blocks == 65
        await collect(client, "abcdefgh" * 3, SamplingParams(max_tokens=1), "r")
        assert client.latest_stats.num_scheduled_tokens == 24
        again = await collect(client, "abcdefgh" * 3, SamplingParams(max_tokens=1), "r")
        assert again[-1].num_cached_tokens == 16
        assert await client.reset_prefix_cache() is True
        again = await collect(client, "abcdefgh" * 3, SamplingParams(max_tokens=1), "r")
        assert again[-1].num_cached_tokens == 0


@in_loop
async def test_tokens_are_counted_once_despite_preemptions_and_aborts() -> None:
    for in_flight, burst in ((1, 1), (2, 1), (2, 4)):
        settings = {"max_steps_in_flight": in_flight, "max_decode_burst": burst}
        async with running(num_blocks=20, **settings) as client:
            params = SamplingParams(max_tokens=40)
            prompts = [f"<{number}>" * 5 for number in range(30)]
            results = await asyncio.gather(
                *(collect(client, p, params, p, stream=p > "<2") for p in prompts)
            )
            assert client.latest_stats.num_preemptions > 0
            totals = client.token_totals
            given = [len(o.outputs[0].token_ids) for outputs in results for o in outputs]
            assert totals.num_generation_tokens == sum(given) == 30 * 40
            assert totals.num_prompt_tokens == sum(map(len, prompts))
            cached = sum(outputs[-1].num_cached_tokens for outputs in results)
            assert totals.num_cached_prompt_tokens == cached
            # All but the first of each were waited for.
            assert sum(totals.token_latency_counts) == 30 * 39


@in_loop
async def test_tokens_of_unfinished_and_aborted_requests_are_counted() -> None:
    async with running(step_s=0.02) as client:
        task = asyncio.create_task(collect(client, "abc", LONG, "r", stream=False))
        while client.token_totals.num_generation_tokens < 3:
            await asyncio.sleep(0.001)
        assert not task.done()
        assert client.token_totals.num_prompt_tokens == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        num_tokens = client.token_totals.num_generation_tokens
        await until_idle(client)
        # Tokens that the engine samples before it handles the abort do not count.
        assert client.token_totals.num_generation_tokens == num_tokens >= 3


@in_loop
async def test_prefix_cache_reset_can_preempt_running_requests() -> None:
    async with running(step_s=0.02) as client:
        task = asyncio.create_task(collect(client, "abc", LONG, "r", stream=False))
        while not (await client.get_stats()).num_running_reqs:
            await asyncio.sleep(0.01)
        assert await client.reset_prefix_cache() is False
        assert await client.reset_prefix_cache(reset_running_requests=True) is True
        (output,) = await task
        assert output.outputs[0].text == ("abc" * 99)[:250]


@in_loop
async def test_every_kind_of_output_has_the_number_of_truncated_tokens() -> None:
    prompt = {"prompt_token_ids": [97, 98, 99], "truncate_prompt_tokens": 1}
    async with running() as client:
        for stream in (True, False):
            params = SamplingParams(max_tokens=2, n=2)
            outputs = await collect(client, prompt, params, "r", stream=stream)
            assert {output.num_truncated_tokens for output in outputs} == {2}
            assert outputs[0].prompt_token_ids == [99]
        (found,) = [
            output
            async for output in client.beam_search(
                prompt, BeamSearchParams(beam_width=1, max_tokens=1), request_id="s"
            )
        ]
        assert (found.prompt_token_ids, found.num_truncated_tokens) == ([99], 2)


@in_loop
async def test_prefix_cache_miss_is_explained_by_the_callers_id() -> None:
    async with running(step_s=0.05) as client:
        for params in (LONG, SamplingParams(max_tokens=250, n=2)):
            generated = client.generate("abcdefgh" * 3, params, request_id="r", stream=True)
            await anext(generated)
            miss = await client.explain_prefix_cache_miss("r")
            assert (miss.request_id, miss.num_tokens) == ("r", 24)
            await generated.aclose()
        with pytest.raises(InvalidRequestError, match="not among the last"):
            await client.explain_prefix_cache_miss("unknown")


@in_loop
async def test_several_completions_are_streamed_concurrently() -> None:
    async with running() as client:
        params = SamplingParams(max_tokens=5, n=3)
        outputs = await collect(client, "abc", params, "r")
        for index in range(3):
            parts = [c for o in outputs for c in o.outputs if c.index == index]
            assert "".join(part.text for part in parts) == "abcab"
            assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {o.request_id for o in outputs} == {"r"}
        (output,) = await collect(client, "abc", params, "r", stream=False)
        assert [(c.index, c.text) for c in output.outputs] == [(i, "abcab") for i in range(3)]
        await until_idle(client)


@in_loop
async def test_abort_ends_all_completions_of_a_request() -> None:
    async with running(step_s=0.05) as client:
        params = SamplingParams(max_tokens=250, n=3)
        generated = client.generate("abc", params, request_id="r", stream=True)
        await anext(generated)
        await generated.aclose()
        await until_idle(client)
        task = asyncio.create_task(collect(client, "abc", params, "r", stream=False))
        while not (await client.get_stats()).num_running_reqs:
            await asyncio.sleep(0.01)
        await client.abort("r")
        (output,) = await task
        assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
        await until_idle(client)
        assert client.num_unfinished_requests == 0


@in_loop
async def test_completion_that_the_engine_refuses_does_not_hang_the_request() -> None:
    async with running() as client:
        send = client._transport.send

        def send_refused(message: object) -> None:
            if isinstance(message, AddRequest) and message.request.request_id.startswith("1_"):
                bad = dataclasses.replace(message.request, prompt_token_ids=[97] * 1000)
                message = AddRequest(request=bad)
            send(message)

        client._transport.send = send_refused
        params = SamplingParams(max_tokens=5, n=3)
        (output,) = await collect(client, "abc", params, "r", stream=False)
        assert [c.finish_reason for c in output.outputs] == ["length", "error", "length"]
        await until_idle(client)


@in_loop
async def test_failed_send_of_one_child_aborts_the_whole_request() -> None:
    async with running(step_s=0.05) as client:
        send = client._transport.send

        def send_some(message: object) -> None:
            if isinstance(message, AddRequest) and message.request.request_id.startswith("2_"):
                raise ValueError("cannot be written")
            send(message)

        client._transport.send = send_some
        with pytest.raises(ValueError, match="cannot be written"):
            await collect(client, "abc", SamplingParams(max_tokens=250, n=3), "r")
        await until_idle(client)
        assert client.num_unfinished_requests == 0


@in_loop
async def test_close_with_drain_finishes_requests_and_rejects_new_ones() -> None:
    async with running(step_s=0.005) as client:
        generated = client.generate("a", SamplingParams(max_tokens=20), request_id="r", stream=True)
        outputs = [await anext(generated)]
        closing = asyncio.create_task(client.close(drain_timeout_s=30))
        await asyncio.sleep(0)
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(client, "abc", LONG, "late")
        # Count tokens and not outputs, because a delayed loop merges deltas.
        outputs += [output async for output in generated]
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 20
        assert outputs[-1].outputs[0].finish_reason == "length"
        await closing


@in_loop
async def test_close_ends_requests_after_the_drain_timeout() -> None:
    async with running(step_s=0.2) as client:
        task = asyncio.create_task(collect(client, "abc", LONG, "r"))
        await asyncio.sleep(0.1)
        await client.close(drain_timeout_s=0.05)
        with pytest.raises(EngineDeadError):
            await task


@in_loop
async def test_prompt_of_token_ids_has_no_prompt_text() -> None:
    async with running() as client:
        (output,) = await collect(client, [97, 98], SamplingParams(max_tokens=3), "r", stream=False)
        assert (output.prompt, output.prompt_token_ids) == (None, [97, 98])
        assert output.outputs[0].text == "aba"


@in_loop
async def test_check_validates_a_request_without_running_it() -> None:
    async with running() as client:
        await client.check([5, 6], SamplingParams(max_tokens=2))
        await client.check([5, 6], BeamSearchParams(beam_width=2, max_tokens=2))
        for params in (SamplingParams(max_tokens=2), BeamSearchParams(beam_width=2, max_tokens=2)):
            with pytest.raises(InvalidRequestError):
                await client.check([-1], params)
        assert client.num_unfinished_requests == 0
        assert (await client.get_stats()).num_steps == 0


@in_loop
async def test_profile_is_recorded_in_the_engine() -> None:
    async with running() as client:
        assert await client.start_profile("folder")
        assert not await client.start_profile("folder")
        assert await client.stop_profile()
        assert not await client.stop_profile()


@in_loop
async def test_forked_process_gets_an_error_and_does_not_end_the_engine() -> None:
    async with running() as client:
        pid = os.getpid()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(ForkedProcessError, match="is a fork"):
                await collect(client, "abc", SamplingParams(max_tokens=5), "r")
            with pytest.raises(ForkedProcessError, match="is a fork"):
                await client.get_stats()
            await client.close(drain_timeout_s=1)
        assert client.is_alive
        (output,) = await collect(client, "abc", SamplingParams(max_tokens=5), "r", stream=False)
        assert output.outputs[0].text == "abcab"
