"""A real HTTP server on a loopback port in a thread, around the fake engine."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from paxkv.config import ServerConfig
from paxkv.server.app import create_app
from paxkv.server.http_server import HttpServer, bind_socket, socket_url
from tests.paxkv.server.fake_engine import FakeEngine


class RunningServer:
    """What a test may touch: the engine behind the server, its address, and an HTTP client."""

    def __init__(self, engine: FakeEngine, url: str, client: httpx.Client) -> None:
        self.engine = engine
        self.url = url
        self.client = client

    @property
    def address(self) -> tuple[str, int]:
        parsed = httpx.URL(self.url)
        return parsed.host, parsed.port


@contextlib.contextmanager
def run_server(engine: FakeEngine, config: ServerConfig) -> Iterator[RunningServer]:
    is_ready = threading.Event()
    bound = bind_socket(config)
    url = socket_url(bound)
    server = HttpServer(create_app(engine, config), engine, config, on_ready=is_ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    try:
        assert is_ready.wait(10)
        with httpx.Client(base_url=url, timeout=10) as client:
            yield RunningServer(engine, url, client)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Starts a server with its own settings; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(
            *,
            seconds_per_token: float = 0.0,
            max_body_bytes: int = 100_000,
            request_timeout_s: float = 5.0,
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
