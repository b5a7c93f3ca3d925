"""uvicorn around the application: opens the port last, and drains before it ends."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from paxkv.config import ServerConfig
from paxkv.errors import ConfigError
from paxkv.server.deadline_protocol import deadline_protocol
from paxkv.server.engine_protocol import EngineClient

# After the engine ended, time for handlers to tell their clients so.
_LAST_WORDS_S = 2.0
_FORCE_EXIT_POLL_S = 0.1
# uvicorn's own limit, which cancels handlers with a traceback each, must not come first.
_UVICORN_MARGIN_S = 60.0
_BACKLOG = 2048


def bind_socket(config: ServerConfig) -> socket.socket:
    """A socket on the configured address that does not listen yet: connections are refused.

    Raises:
        ConfigError: The address does not exist or is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(f"{config.host}:{config.port}", error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_listen(f"{config.host}:{config.port}", error) from error
    return bound


def socket_url(bound: socket.socket) -> str:
    """The address that a client on this machine would use."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves an application until a signal comes, then lets running requests finish.

    Args:
        on_ready: Called once the port is open.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: EngineClient,
        config: ServerConfig,
        *,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=deadline_protocol(config.request_timeout_s),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=config.shutdown_timeout_s + _UVICORN_MARGIN_S,
            )
        )
        self._app = app
        self._engine = engine
        self._shutdown_timeout_s = config.shutdown_timeout_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the port.

        Raises:
            ConfigError: Another server opened it since `bind_socket`.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _cannot_listen("the chosen address", error) from error
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuses new connections, waits for running requests, ends those that take too long."""
        if isinstance(self._app, Starlette):
            self._app.state.close_streams()
        ender = asyncio.ensure_future(self._end_requests_when_late())
        try:
            await super().shutdown(sockets)
        finally:
            ender.cancel()
            await asyncio.gather(ender, return_exceptions=True)
            self._cut_connections()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but a signal that was answered is not raised a second time.

        uvicorn raises it again after the drain, and the process would die of it instead of
        returning 0.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one ends at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def _end_requests_when_late(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._shutdown_timeout_s
        while loop.time() < deadline and not self.force_exit:
            await asyncio.sleep(_FORCE_EXIT_POLL_S)
        if not self.force_exit:
            # Requests that still run end with EngineDeadError, which their clients are told.
            await self._engine.close(drain_timeout_s=0.0)
            await asyncio.sleep(_LAST_WORDS_S)
        self._cut_connections()

    def _cut_connections(self) -> None:
        """Ends what is left, as if the clients had gone: their handlers are cancelled quietly."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _cannot_listen(where: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {where}: {error.strerror or error}. Choose another --host or --port."
    )
