"""Engines that die under load: errors of their requests, and their replacement."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.engine_config import EngineConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import Shutdown
from paxkv.errors import EngineDeadError
from paxkv.fleet import engine_process
from paxkv.fleet.engine_supervisor import EngineSupervisor, RestartPolicy
from paxkv.fleet.follower_hosts import FollowerHosts
from tests.paxkv.client.test_async_client import LONG, collect, in_loop, until_idle
from tests.paxkv.engine.fake_engine_process import COMMAND, VOCAB_SIZE, fake_config
from tests.paxkv.engine.forked_engines import engines_forked_by_a_new_process
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer

# Time limit in seconds that is not reached unless a test fails, even on a busy machine.
PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[None]:
    with engines_forked_by_a_new_process():
        yield


@contextlib.asynccontextmanager
async def running(
    *,
    max_restarts: int = 3,
    window_s: float = 600.0,
    max_step_s: float = 300.0,
    config: EngineConfig | None = None,
    hosts: FollowerHosts | None = None,
    **settings: object,
) -> AsyncIterator[AsyncEngineClient]:
    """A client with its own engine process.

    Args:
        config: None: made of `settings`.
        hosts: Of the engine's other processes.
    """
    policy = RestartPolicy(max_restarts=max_restarts, window_s=window_s)
    supervisor = EngineSupervisor(
        config or fake_config(**settings),
        policy,
        max_step_s=max_step_s,
        max_idle_start_s=600.0,
        command=COMMAND,
        hosts=hosts,
    )
    try:
        ready = supervisor.wait_until_ready(lambda folder: None)
    except BaseException:
        supervisor.close()
        raise
    tokenizer = byte_level_tokenizer()
    client = AsyncEngineClient(
        supervisor,
        InputProcessor(
            tokenizer=tokenizer,
            vocab_size=VOCAB_SIZE,
            max_model_len=ready.model_info.max_model_len,
            max_fitting_tokens=ready.model_info.max_fitting_tokens,
        ),
        OutputProcessor(tokenizer),
        ready.model_info,
        tokenizer=tokenizer,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.close(drain_timeout_s=0)
        assert not supervisor._thread.is_alive()
        assert not Path(f"/proc/{supervisor.pid}").exists()


def kill_engine(client: AsyncEngineClient) -> None:
    os.kill(client._transport.pid, signal.SIGKILL)


async def until_alive(client: AsyncEngineClient) -> None:
    while not client.is_alive:
        await asyncio.sleep(0.01)


async def until_dead(client: AsyncEngineClient) -> None:
    while client.is_alive:
        await asyncio.sleep(0.005)


async def text_of(client: AsyncEngineClient, prompt: str, num_tokens: int, **more: object) -> str:
    params = SamplingParams(max_tokens=num_tokens)
    outputs = await collect(client, prompt, params, prompt, **more)
    return "".join(o.outputs[0].text for o in outputs)


@in_loop
async def test_many_streams_and_requests_get_their_own_outputs() -> None:
    async with running(max_num_seqs=64, num_blocks=1000) as client:
        prompts = [f"<{number}>" for number in range(128)]
        texts = await asyncio.gather(*(text_of(client, prompt, 20) for prompt in prompts))
        assert texts == [(prompt * 20)[:20] for prompt in prompts]
        prompts = [f"[{number}]" for number in range(300)]
        texts = await asyncio.gather(
            *(text_of(client, prompt, 3, stream=False) for prompt in prompts)
        )
        assert texts == [prompt[:3] for prompt in prompts]
        await until_idle(client)
        assert client.num_unfinished_requests == 0


@pytest.mark.slow  # pytest -m slow tests/paxkv/fleet/test_engine_supervisor.py
@in_loop
async def test_bursts_of_5000_requests_lose_none() -> None:
    async with running(max_num_seqs=64, num_blocks=1000) as client:
        for burst in range(2):
            prompts = [f"[{burst}.{number}]" for number in range(5000)]
            texts = await asyncio.gather(
                *(text_of(client, prompt, 8, stream=False) for prompt in prompts)
            )
            assert texts == [(prompt * 8)[:8] for prompt in prompts]
        await until_idle(client)


@in_loop
async def test_huge_prompt_does_not_delay_a_stream() -> None:
    length = 400_000
    async with running(max_model_len=2 * length, num_blocks=60_000, step_s=0.002) as client:
        stream = client.generate(
            "abc", SamplingParams(max_tokens=100_000), request_id="a", stream=True
        )
        await anext(stream)
        large = asyncio.create_task(
            collect(client, [97] * length, SamplingParams(max_tokens=2), "b", stream=False)
        )
        gaps_s, works_s = [], []
        for _ in range(200):
            before_s, worked_s = time.monotonic(), time.thread_time()
            await anext(stream)
            gaps_s.append(time.monotonic() - before_s)
            works_s.append(time.thread_time() - worked_s)
        large.cancel()
        await stream.aclose()
        await until_idle(client)
    # Of the loop's own work, and not the engine's: what else the machine does counts for little.
    assert max(works_s) < 2.0 and max(gaps_s) < 30.0


@in_loop
async def test_killed_engine_ends_its_requests_and_is_replaced() -> None:
    async with running(step_s=0.01) as client:
        tasks = [
            asyncio.create_task(collect(client, "abc", LONG, str(number), stream=number % 2 == 0))
            for number in range(64)
        ]
        while (await client.get_stats()).num_steps < 5:
            await asyncio.sleep(0.01)
        call = asyncio.create_task(client.get_stats())
        kill_engine(client)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "SIGKILL" in str(result)
        await asyncio.gather(call, return_exceptions=True)
        assert not client.is_alive and client.num_unfinished_requests == 0
        assert client.latest_stats.num_running_reqs == 0
        with pytest.raises(EngineDeadError, match="try again") as raised:
            await text_of(client, "late", 1)
        assert raised.value.retry_after_s >= 1
        with pytest.raises(EngineDeadError):
            await client.get_stats()
        await until_alive(client)
        stats = await client.get_stats()
        assert (stats.num_steps, stats.kv_cache_usage, stats.num_blocks) == (0, 0.0, 65)
        assert await text_of(client, "xyz", 6) == "xyzxyz"
        assert await client.reset_prefix_cache() is True
        await until_idle(client)


def test_replacement_has_the_same_sizes_as_the_first_engine(tmp_path: Path) -> None:
    order_file = tmp_path / "orders"

    @in_loop
    async def run() -> None:
        async with running(order_file=str(order_file), max_model_len=64) as client:
            kill_engine(client)
            while client.is_alive:
                await asyncio.sleep(0.01)
            await until_alive(client)

    run()
    assert order_file.read_text().splitlines() == ["None None", "65 64"]


@in_loop
async def test_error_of_a_failed_step_is_reported_and_engine_is_replaced() -> None:
    async with running(fails_at_step=3) as client:
        results = await asyncio.gather(
            *(collect(client, "abc", LONG, str(number)) for number in range(4)),
            return_exceptions=True,
        )
        assert all("the device is on fire" in str(result) for result in results)
        await until_alive(client)
        assert await text_of(client, "xyz", 3) == "xyz"


@in_loop
async def test_hanging_step_ends_its_requests_and_engine_is_replaced() -> None:
    async with running(hangs_at_step=3, max_step_s=0.4, max_restarts=1) as client:
        pid = client._transport.pid
        results = await asyncio.gather(
            *(collect(client, "abc", LONG, str(number)) for number in range(4)),
            return_exceptions=True,
        )
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert "no step has ended for 0.4 seconds" in str(result)
        assert not client.is_alive
        client._transport._step_watch.limit_s = PATIENCE_S
        await until_alive(client)
        assert not Path(f"/proc/{pid}").exists()
        assert await text_of(client, "xyz", 3) == "xyz"
        client._transport._step_watch.limit_s = 0.4
        # A hang counts as a death, so no further restart is allowed.
        with contextlib.suppress(EngineDeadError):
            await text_of(client, "xyz", 9)
        assert "0.4 seconds" in await client.wait_until_ended()


@in_loop
async def test_engine_that_does_not_wake_is_replaced() -> None:
    async with running(max_step_s=0.4) as client:
        await asyncio.sleep(0.5)
        os.kill(client._transport.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="it hangs"):
            await text_of(client, "abc", 3)
        client._transport._step_watch.limit_s = PATIENCE_S
        await until_alive(client)
        assert await text_of(client, "xyz", 3) == "xyz"


def test_hanging_engine_prints_a_traceback(
    capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine prints the traceback before it is killed, even on a busy machine.
    monkeypatch.setattr(engine_process, "_TRACEBACK_S", PATIENCE_S)

    async def until_said(said: str, words: str) -> str:
        while words not in said:
            await asyncio.sleep(0.01)
            said += capfd.readouterr().err
        return said

    @in_loop
    async def run() -> None:
        async with running(hangs_at_step=0, max_step_s=PATIENCE_S, max_restarts=0) as client:
            refused = asyncio.create_task(text_of(client, "abc", 3))
            said = await until_said("", "the step hangs")
            client._transport._step_watch.limit_s = 0.2
            with pytest.raises(EngineDeadError):
                await refused
            said = await until_said(said, "in execute_model")
            assert "fake_engine.py" in said
            kill_engine(client)
            while Path(f"/proc/{client._transport.pid}").exists():
                await asyncio.sleep(0.01)

    run()


@in_loop
async def test_engine_with_unusable_messages_is_replaced() -> None:
    async with running(step_s=0.01, max_restarts=1) as client:
        process = client._output_processor.process

        def fail(step_outputs: object) -> None:
            raise RuntimeError("no such token")

        client._output_processor.process = fail
        pid = client._transport.pid
        results = await asyncio.gather(
            *(collect(client, "abc", LONG, str(number)) for number in range(4)),
            return_exceptions=True,
        )
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert all("RuntimeError: no such token" in str(result) for result in results)
        assert client.num_unfinished_requests == client._output_processor.num_unfinished_requests
        client._output_processor.process = process
        await until_alive(client)
        assert client._transport.pid != pid
        assert await text_of(client, "xyz", 3) == "xyz"
        client._output_processor.process = fail
        with pytest.raises(EngineDeadError):
            await text_of(client, "xyz", 3)
        assert "no such token" in await client.wait_until_ended()


@in_loop
async def test_slow_starts_idle_engines_and_many_steps_do_not_count_as_hanging() -> None:
    # This test checks the arguments of the watch; `test_step_watch.py` checks its decisions.
    async with running(start_s=0.5, step_s=0.04, max_step_s=PATIENCE_S) as client:
        watch, looks = client._transport._step_watch, []
        watch.period_s = 0.02
        is_too_long = watch.is_too_long

        def look(count: int, num_sent: int, now_s: float) -> bool:
            looks.append((count, num_sent))
            return is_too_long(count, num_sent, now_s)

        watch.is_too_long = look
        while len(looks) < 5:
            await asyncio.sleep(0.02)
        # The engine sleeps, and no message was sent to it.
        (idle,) = set(looks)
        assert idle[0] % 2 == 0
        assert await text_of(client, "abc", 20) == ("abc" * 7)[:20]
        # Each step increases the count; the last increase may come after the last token.
        while client._transport._process.step_count < idle[0] + 2 * 20:
            await asyncio.sleep(0.01)
        assert len({count for count, _ in looks}) >= 3
        kill_engine(client)
        await until_dead(client)
        looks.clear()
        while not client.is_alive:
            assert looks == []
            await asyncio.sleep(0.01)
        assert await text_of(client, "abc", 5) == "abcab"
        assert client._transport._num_restarts == 1


@in_loop
async def test_engine_without_restarts_ends_for_good() -> None:
    async with running(max_restarts=0) as client:
        kill_engine(client)
        assert "SIGKILL" in await client.wait_until_ended()
        with pytest.raises(EngineDeadError) as raised:
            await text_of(client, "late", 1)
        assert raised.value.retry_after_s is None


@in_loop
async def test_only_consecutive_restarts_are_limited() -> None:
    async with running(max_restarts=1) as client:
        kill_engine(client)
        await until_dead(client)
        await until_alive(client)
        kill_engine(client)
        assert "SIGKILL" in await client.wait_until_ended()
    async with running(max_restarts=1, window_s=0.001) as client:
        for _ in range(3):
            kill_engine(client)
            await until_dead(client)
            await until_alive(client)
            await asyncio.sleep(0.01)


@in_loop
async def test_tokens_of_a_dead_engine_stay_counted() -> None:
    async with running() as client:
        assert await text_of(client, "abc", 5) == "abcab"
        kill_engine(client)
        await until_dead(client)
        await until_alive(client)
        assert await text_of(client, "ab", 3) == "aba"
        totals = client.token_totals
        assert (totals.num_prompt_tokens, totals.num_generation_tokens) == (5, 8)


def test_failed_starts_count_as_restarts_and_pauses_double(tmp_path: Path) -> None:
    pauses_s = []

    @in_loop
    async def run() -> None:
        healthy_file = str(tmp_path / "was-started")
        async with running(max_restarts=4, healthy_file=healthy_file) as client:
            is_closing = client._transport._is_closing
            wait = is_closing.wait
            is_closing.wait = lambda pause_s: pauses_s.append(pause_s) or wait(0)
            kill_engine(client)
            reason = await client.wait_until_ended()
            assert reason == "it could not be started again: the second start fails"

    run()
    assert pauses_s == [0, 1, 2, 4]


@in_loop
async def test_close_does_not_wait_for_a_starting_engine() -> None:
    async with running(step_s=0.01) as client:
        client._transport._config = fake_config(start_s=3600)
        kill_engine(client)
        await until_dead(client)
        await client.close(drain_timeout_s=0)
        assert await client.wait_until_ended() == "it was shut down"


@in_loop
async def test_drain_does_not_wait_for_a_starting_engine() -> None:
    async with running(step_s=0.01) as client:
        supervisor = client._transport
        supervisor._config = fake_config(start_s=3600)
        first_pid = supervisor.pid
        kill_engine(client)
        while supervisor.pid == first_pid:
            await asyncio.sleep(0.01)
        # As with several engines, whose client continues to drain.
        with pytest.raises(EngineDeadError):
            supervisor.send(Shutdown(drain=True))
        reason = await asyncio.wait_for(client.wait_until_ended(), PATIENCE_S)
        assert reason == "it was shut down"


@in_loop
async def test_drain_finishes_requests_and_starts_no_engine() -> None:
    async with running(step_s=0.005) as client:
        generated = client.generate("a", SamplingParams(max_tokens=20), request_id="r", stream=True)
        outputs = [await anext(generated)]
        closing = asyncio.create_task(client.close(drain_timeout_s=30))
        await asyncio.sleep(0)
        # Count tokens and not outputs, because a delayed loop merges deltas.
        outputs += [output async for output in generated]
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 20
        await closing
        assert await client.wait_until_ended() == "it was shut down"
        assert client._transport._num_restarts == 0
