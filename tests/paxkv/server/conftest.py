"""A real HTTP server on a loopback port in a thread, around the fake engine."""

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.server.app import create_app
from paxkv.server.http_server import HttpServer, bind_socket, socket_url
from tests.paxkv.server.fake_engine import FakeEngine

# Seconds that no test waits for unless it fails, however busy the machine is.
PATIENCE_S = 60.0
# Seconds that a token takes of an engine that computes none before the test moves its clock.
HELD_S = 3600.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


class ShiftedLoop(asyncio.SelectorEventLoop):
    """Its clock can be moved on, so that a deadline need not be waited for, nor come by itself."""

    shift_s = 0.0

    def time(self) -> float:
        return super().time() + self.shift_s

    def move_clock(self, seconds: float) -> None:
        """Called on the loop."""
        self.shift_s += seconds


class RunningServer:
    """What a test may touch: the engine behind the server, its address, and an HTTP client."""

    def __init__(
        self,
        engine: FakeEngine,
        url: str,
        client: httpx.Client,
        server: HttpServer,
        loop: ShiftedLoop,
        verify: ssl.SSLContext | bool,
    ) -> None:
        self.engine = engine
        self.url = url
        self.client = client
        self._server = server
        self._loop = loop
        self._verify = verify

    def pass_time(self, seconds: float) -> None:
        """Moves the server's clock, after all that was sent to it; what was due has been done."""
        self._answer_others()
        self._loop.call_soon_threadsafe(self._loop.move_clock, seconds)
        self._answer_others()

    def answer_once_running(self, num_requests: int, *, seconds_per_token: float = 0.0) -> None:
        """Waits for this many requests at `HELD_S` per token, then lets the engine compute."""
        wait_until(lambda: len(self.engine.running) == num_requests)
        self.engine.seconds_per_token = seconds_per_token
        self.pass_time(HELD_S)

    def _answer_others(self) -> None:
        """A connection that is opened later is served later."""
        response = httpx.get(f"{self.url}/version", timeout=PATIENCE_S, verify=self._verify)
        assert response.status_code == 200

    @property
    def connections(self) -> set[asyncio.Protocol]:
        return set(self._server.server_state.connections)

    @property
    def address(self) -> tuple[str, int]:
        parsed = httpx.URL(self.url)
        return parsed.host, parsed.port


@contextlib.contextmanager
def run_server(engine: FakeEngine, config: ServerConfig) -> Iterator[RunningServer]:
    is_ready = threading.Event()
    bound = bind_socket(config)
    url = socket_url(bound, is_tls=config.is_tls)
    server = HttpServer(create_app(engine, config), engine, config, on_ready=is_ready.set)
    loop = ShiftedLoop()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.serve(sockets=[bound]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert is_ready.wait(PATIENCE_S)
        verify = ssl.create_default_context(cafile=config.ssl_certfile) if config.is_tls else True
        with httpx.Client(base_url=url, timeout=PATIENCE_S, verify=verify) as client:
            yield RunningServer(engine, url, client, server, loop, verify)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Starts a server with its own settings; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(
            *,
            seconds_per_token: float = 0.0,
            max_body_bytes: int = 100_000,
            request_timeout_s: float = PATIENCE_S,
            shutdown_timeout_s: float = 2.0,
            **settings: object,
        ) -> RunningServer:
            config = ServerConfig(
                port=0,
                max_body_bytes=max_body_bytes,
                request_timeout_s=request_timeout_s,
                shutdown_timeout_s=shutdown_timeout_s,
                **settings,
            )
            engine = FakeEngine(seconds_per_token=seconds_per_token)
            return stack.enter_context(run_server(engine, config))

        yield start


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    """One fast server for all tests of a file that leave it as they found it."""
    config = ServerConfig(port=0, max_body_bytes=100_000, shutdown_timeout_s=2.0)
    with run_server(FakeEngine(), config) as server:
        yield server
