"""An engine on two hosts, which are here two threads with a fake process each."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from paxkv.client.async_client import AsyncEngineClient
from paxkv.config.engine_config import EngineConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.fleet.follower_host import FollowerHost
from paxkv.fleet.follower_hosts import FollowerHosts
from tests.paxkv.client.test_async_client import in_loop, until_idle
from tests.paxkv.engine.fake_engine_process import COMMAND, fake_config
from tests.paxkv.engine.forked_engines import engines_forked_by_a_new_process
from tests.paxkv.fleet.test_engine_supervisor import running, text_of, until_alive

PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[None]:
    with engines_forked_by_a_new_process():
        yield


def make_config(**settings: object) -> EngineConfig:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    parallel = ParallelConfig(
        tensor_parallel_size=2, nnodes=2, master_port=port, distributed_timeout_seconds=30
    )
    return dataclasses.replace(fake_config(**settings), parallel=parallel)


class Host1:
    """Host 1, in a thread."""

    def __init__(self, config: EngineConfig, **changes: object) -> None:
        parallel = dataclasses.replace(config.parallel, node_rank=1)
        config = dataclasses.replace(config, parallel=parallel, **changes)
        self.host = FollowerHost(config, max_idle_start_s=600.0, command=COMMAND)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self.ended: Future[None] = self._thread.submit(self.host.run)
        self._thread.shutdown(wait=False)

    @property
    def pid(self) -> int | None:
        process = self.host._process
        return None if process is None else process.pid


@contextlib.asynccontextmanager
async def running_group(
    **settings: object,
) -> AsyncIterator[tuple[AsyncEngineClient, FollowerHosts, Host1]]:
    config = make_config(**settings)
    hosts = FollowerHosts(config)
    host = Host1(config)
    try:
        # An engine that is ready counts as healthy, so each death is the first one in a row.
        async with running(config=config, hosts=hosts, window_s=0.0) as client:
            yield client, hosts, host
    finally:
        hosts.close()
        concurrent.futures.wait([host.ended], PATIENCE_S)
    assert host.ended.done()


async def until_error(client: AsyncEngineClient) -> str:
    """Streams until the engine dies; returns the error."""
    stream = client.generate(
        "abc", SamplingParams(max_tokens=100_000), request_id="long", stream=True
    )
    with pytest.raises(EngineDeadError) as caught:
        async for _ in stream:
            pass
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_processes_are_replaced_when_one_is_killed(rank: int) -> None:
    asyncio.run(check_replacement(rank))


async def check_replacement(rank: int) -> None:
    async with running_group(step_s=0.01, max_model_len=200_000, num_blocks=30_000) as group:
        client, _, host = group
        assert await text_of(client, "abc", 6) == "abcabc"
        old = [client._transport.pid, host.pid]
        failing = asyncio.create_task(until_error(client))
        await asyncio.sleep(0.1)
        os.kill(old[rank], signal.SIGKILL)
        error = await asyncio.wait_for(failing, PATIENCE_S)
        assert "SIGKILL" in error
        assert ("host 1" in error) == (rank == 1)
        await asyncio.wait_for(until_alive(client), PATIENCE_S)
        assert await text_of(client, "abc", 6) == "abcabc"
        # The fake leader does not wait for the follower.
        async with asyncio.timeout(PATIENCE_S):
            while host.pid in (None, old[1]):
                await asyncio.sleep(0.01)
        assert client._transport.pid != old[0]
        assert not any(Path(f"/proc/{pid}").exists() for pid in old)
    # A shutdown of the server is no error of the other host.
    host.ended.result()


@pytest.mark.slow  # pytest -m slow -s tests/paxkv/fleet/test_follower_hosts.py
@in_loop
async def test_every_request_ends_while_processes_are_killed_50_times() -> None:
    rng = random.Random(0)
    settings = {"step_s": 0.002, "max_model_len": 2000, "num_blocks": 3000}
    async with running_group(**settings) as group:
        client, _, host = group
        outcomes: Counter[str] = Counter()
        is_over = asyncio.Event()

        async def send_requests(name: str) -> None:
            while not is_over.is_set():
                try:
                    text = await asyncio.wait_for(text_of(client, name, 100), PATIENCE_S)
                    assert text == (name * 100)[:100]
                    outcomes["answer"] += 1
                except EngineDeadError:
                    outcomes["error"] += 1
                    await asyncio.sleep(0.02)

        clients = [asyncio.create_task(send_requests(f"<{idx}>")) for idx in range(8)]
        away_s = []
        for kill_idx in range(50):
            await asyncio.sleep(rng.uniform(0, 0.3))
            # A process may also be killed while it starts.
            killed = client._transport.pid if kill_idx % 2 else host.pid
            if killed is None or not Path(f"/proc/{killed}").exists():
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(killed, signal.SIGKILL)
            began_s = time.monotonic()
            await asyncio.sleep(0.05)
            await asyncio.wait_for(until_alive(client), PATIENCE_S)
            away_s.append(time.monotonic() - began_s)
        is_over.set()
        await asyncio.wait_for(asyncio.gather(*clients), PATIENCE_S)
        print(f"\n{len(away_s)} kills, away for up to {max(away_s):.2f} s, {dict(outcomes)}")
        assert len(away_s) > 25 and min(outcomes["answer"], outcomes["error"]) > 0
        assert await text_of(client, "abc", 6) == "abcabc"
        await until_idle(client)


@in_loop
async def test_error_of_a_follower_is_the_error_of_the_start() -> None:
    for setting, words in (("follower_mistake", "no GPU"), ("follower_error", "RuntimeError: no")):
        with pytest.raises(EngineDeadError, match=f"host 1 has ended: {words}"):
            async with running_group(start_s=30, **{setting: "no GPU here"}):
                pass


@in_loop
async def test_lost_host_ends_requests_and_may_come_back() -> None:
    async with running_group(step_s=0.01, max_model_len=200_000, num_blocks=30_000) as group:
        client, hosts, host = group
        failing = asyncio.create_task(until_error(client))
        await asyncio.sleep(0.1)
        hosts._links[1].close()
        assert "host 1 is lost" in await asyncio.wait_for(failing, PATIENCE_S)
        with pytest.raises(EngineDeadError, match=r"host 0 at 127.0.0.1:\d+ is lost"):
            host.ended.result(PATIENCE_S)
        again = Host1(hosts._config)
        await asyncio.wait_for(until_alive(client), PATIENCE_S)
        assert await text_of(client, "abc", 6) == "abcabc"
    again.ended.result(PATIENCE_S)


def test_host_with_other_flags_is_refused_with_their_names() -> None:
    config = make_config()
    hosts = FollowerHosts(config)
    try:
        scheduler = dataclasses.replace(config.scheduler, max_num_seqs=7)
        expected = "max_num_seqs=7 (host 0: "
        with pytest.raises(ConfigError, match=re.escape(expected)):
            Host1(config, scheduler=scheduler).ended.result(PATIENCE_S)
        with pytest.raises(EngineDeadError, match=r"hosts \[1\] did not connect within 1 seconds"):
            quick = dataclasses.replace(config.parallel, distributed_timeout_seconds=1)
            hosts.start(dataclasses.replace(config, parallel=quick), print)
    finally:
        hosts.close()


def test_secrets_are_not_sent_to_other_hosts() -> None:
    model = dataclasses.replace(make_config().model, hf_token="secret-token")
    config = dataclasses.replace(make_config(), model=model)
    with socket.create_server(("127.0.0.1", config.parallel.master_port)) as server:
        host = Host1(config)
        connected, _ = server.accept()
        with connected:
            assert b"secret-token" not in connected.recv(1 << 16)
    with pytest.raises(EngineDeadError):
        host.ended.result(PATIENCE_S)


def test_host_gives_up_if_host_0_does_not_answer() -> None:
    config = make_config()
    parallel = dataclasses.replace(config.parallel, distributed_timeout_seconds=1)
    host = Host1(dataclasses.replace(config, parallel=parallel))
    with pytest.raises(EngineDeadError, match="could not be reached at 127.0.0.1:"):
        host.ended.result(PATIENCE_S)


def test_taken_port_is_a_config_error() -> None:
    config = make_config()
    with (
        socket.create_server(("127.0.0.1", config.parallel.master_port)),
        pytest.raises(ConfigError, match="Set --master-addr to an address of this host"),
    ):
        FollowerHosts(config)
