"""Two fake engine processes as one: a death ends only the requests of its process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.inproc_client import InprocClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_output import EngineDead
from paxkv.contracts.engine_start import EngineReady
from paxkv.errors import EngineDeadError
from paxkv.fleet.data_parallel import DataParallelTransport
from paxkv.fleet.engine_supervisor import EngineSupervisor, RestartPolicy
from paxkv.fleet.loop_thread import LoopThread
from tests.paxkv.client.test_async_client import collect, in_loop
from tests.paxkv.engine.fake_engine_process import COMMAND, VOCAB_SIZE, fake_config
from tests.paxkv.engine.forked_engines import engines_forked_by, forking_process
from tests.paxkv.forked_processes import ForkedProcesses
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer

EXIT_WITHOUT_CLOSE = """
import weakref
from paxkv.fleet.loop_thread import LoopThread
from tests.paxkv.fleet.test_loop_thread import started_replicas

class Owner:
    pass

replicas = started_replicas()
engines, transport = replicas.__enter__()
first, second = Owner(), Owner()
# At the end of the interpreter the one that was made last is called first.
weakref.finalize(first, lambda: print(*(engine._process.wait(0.0) for engine in engines)))
weakref.finalize(second, LoopThread(transport).close)
"""


def test_engines_end_at_interpreter_exit_without_close() -> None:
    script = [sys.executable, "-c", EXIT_WITHOUT_CLOSE]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    assert "Traceback" not in done.stderr
    # The exit codes show that no engine was killed.
    assert done.stdout.split() == ["0", "0"]


@pytest.fixture(scope="module")
def forker() -> Iterator[ForkedProcesses]:
    with forking_process() as process:
        yield process


@pytest.fixture
def forked(forker: ForkedProcesses) -> Iterator[None]:
    with engines_forked_by(forker):
        yield


@contextlib.contextmanager
def started_replicas(
    *, max_restarts: int = 3, **settings: object
) -> Iterator[tuple[list[EngineSupervisor], DataParallelTransport]]:
    """Two processes of the fake engine, behind one transport."""
    policy = RestartPolicy(max_restarts=max_restarts, window_s=600.0)
    engines = [
        EngineSupervisor(
            fake_config(**settings),
            policy,
            max_step_s=300.0,
            max_idle_start_s=600.0,
            command=COMMAND,
            environment={"REPLICA": str(idx)},
        )
        for idx in range(2)
    ]
    try:
        readies = [engine.wait_until_ready(lambda folder: None) for engine in engines]
        yield engines, DataParallelTransport(list(zip(engines, readies, strict=True)))
    finally:
        for engine in engines:
            engine.close()


def input_processor(ready: EngineReady) -> InputProcessor:
    return InputProcessor(
        tokenizer=byte_level_tokenizer(),
        vocab_size=VOCAB_SIZE,
        max_model_len=ready.model_info.max_model_len,
        max_fitting_tokens=ready.model_info.max_fitting_tokens,
    )


@contextlib.asynccontextmanager
async def running(
    **settings: object,
) -> AsyncIterator[tuple[list[EngineSupervisor], AsyncEngineClient]]:
    tokenizer = byte_level_tokenizer()
    with started_replicas(**settings) as (engines, transport):
        client = AsyncEngineClient(
            transport,
            input_processor(transport.ready),
            OutputProcessor(tokenizer, num_engines=2),
            transport.ready.model_info,
            tokenizer=tokenizer,
        )
        await client.start()
        try:
            yield engines, client
        finally:
            await client.close(drain_timeout_s=0)


async def text_of(client: AsyncEngineClient, prompt: str, num_tokens: int) -> str:
    outputs = await collect(client, prompt, SamplingParams(max_tokens=num_tokens), prompt)
    return "".join(output.outputs[0].text for output in outputs)


@in_loop
async def test_death_of_a_replica_ends_only_its_requests() -> None:
    async with running(step_s=0.02, max_num_seqs=8, max_model_len=2048, num_blocks=2200) as (
        engines,
        client,
    ):
        environments = [Path(f"/proc/{engine.pid}/environ").read_text() for engine in engines]
        assert ["REPLICA=1" in text for text in environments] == [False, True]
        prompts = [f"<{number}>" for number in range(8)]
        texts = [asyncio.create_task(text_of(client, prompt, 1900)) for prompt in prompts]
        while client.latest_stats.num_running_reqs < 8:
            await asyncio.sleep(0.01)
        os.kill(engines[0].pid, signal.SIGKILL)
        await asyncio.wait(texts, return_when=asyncio.FIRST_EXCEPTION)
        # While the dead engine is replaced, the other serves new requests.
        assert await text_of(client, "abc", 5) == "abcab"
        assert client.is_alive
        for prompt in prompts:
            await client.abort(prompt)
        ends = await asyncio.gather(*texts, return_exceptions=True)
        died = [end for end in ends if isinstance(end, EngineDeadError)]
        assert len(died) == 4 and {error.retry_after_s for error in died} == {1}
        assert "SIGKILL" in str(died[0]) and "Others go on" in str(died[0])
        lived = [(p, end) for p, end in zip(prompts, ends, strict=True) if isinstance(end, str)]
        assert len(lived) == 4 and all(end and (p * 700).startswith(end) for p, end in lived)
        # Then both engines serve again.
        while client._transport._replicas[0].ended is not None:
            await asyncio.sleep(0.01)
        texts = await asyncio.gather(*(text_of(client, f"[{i}]", 20) for i in range(40)))
        assert texts == [(f"[{i}]" * 20)[:20] for i in range(40)]


@pytest.mark.usefixtures("forked")
@in_loop
async def test_completions_and_beams_run_where_their_prompt_is() -> None:
    async with running() as (_, client):
        params = SamplingParams(max_tokens=6, n=3)
        for number in range(4):
            (output,) = await collect(client, "abc", params, f"n{number}", stream=False)
            assert [c.text for c in output.outputs] == ["abcabc"] * 3
        search = client.beam_search(
            "ab", BeamSearchParams(beam_width=2, max_tokens=4), request_id="beam"
        )
        (output,) = [output async for output in search]
        assert output.outputs[0].text == "aaaa"
        await client.reset_prefix_cache()
        stats = await client.get_stats()
        assert (stats.num_running_reqs, stats.kv_cache_usage) == (0, 0.0)


@pytest.mark.usefixtures("forked")
def test_synchronous_client_reports_a_death_and_can_continue() -> None:
    settings = {"step_s": 0.02, "max_model_len": 2048, "num_blocks": 2200}
    with started_replicas(max_restarts=0, **settings) as (engines, replicas):
        processor, transport = input_processor(replicas.ready), LoopThread(replicas)
        client = InprocClient(transport, OutputProcessor(byte_level_tokenizer(), num_engines=2))
        assert transport.receive(timeout_s=0.01) is None

        def add(name: str, num_tokens: int) -> None:
            params = SamplingParams(max_tokens=num_tokens)
            client.add_request(processor.process("abc", params, request_id=name))

        for number in range(4):
            add(f"long{number}", 1900)
        assert client.wait_for_outputs() == []
        os.kill(engines[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            while True:
                client.wait_for_outputs()
        client.abort([f"long{number}" for number in range(4)])
        add("short", 4)
        texts = []
        while not texts:
            texts = [output.outputs[0].text for output in client.wait_for_outputs()]
        assert texts == ["abca"]
        assert client.call("reset_prefix_cache", False) == "true"
        client.close()
        client.close()
        # The surviving engine's last messages may come first.
        while not isinstance(transport.receive(), EngineDead):
            pass
        assert isinstance(transport.receive(), EngineDead)
