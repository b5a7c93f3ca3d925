"""`HttpServer`: runs the application in uvicorn, and drains requests before it ends."""

import asyncio
import contextlib
import functools
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from paxkv.config.server_config import ServerConfig
from paxkv.errors import ConfigError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.middleware.deadline_protocol import deadline_protocol
from paxkv.server.open_files import allow_connections

# Time for handlers to send an error to their clients after the engine has ended.
_SEND_ERRORS_S = 2.0
_FORCE_EXIT_POLL_S = 0.1
# uvicorn's own limit must not be reached first: it cancels each handler with a traceback.
_UVICORN_MARGIN_S = 60.0
_BACKLOG = 2048
# Lifetime of an idle connection. Clients and load balancers should close it first (Python's clients
# after 5 s, most balancers after 60 s): a request sent while the server closes it is lost.
_KEEP_ALIVE_S = 75


def bind_socket(config: ServerConfig) -> socket.socket:
    """Binds a socket to the configured address. It does not listen yet: connections are refused.

    Raises:
        ConfigError: The address does not exist or is taken, the files for HTTPS cannot be used,
            or the limit of open files is too low for the configured connections.
    """
    allow_connections(config.max_connections)
    _check_tls_files(config)
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


def socket_url(bound: socket.socket, *, is_tls: bool = False) -> str:
    """The server's URL for clients on this machine."""
    scheme = "https" if is_tls else "http"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves an application until a signal arrives, then lets running requests finish.

    Args:
        on_ready: Called when the port is open.
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
                http=deadline_protocol(
                    config.request_timeout_s,
                    max_connections=allow_connections(config.max_connections),
                    root_path=config.root_path or "",
                ),
                h11_max_incomplete_event_size=config.max_header_bytes,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=config.shutdown_timeout_s + _UVICORN_MARGIN_S,
            )
        )
        self._app = app
        self._engine = engine
        self._request_timeout_s = config.request_timeout_s
        self._shutdown_timeout_s = config.shutdown_timeout_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the port.

        Raises:
            ConfigError: Another server opened the port after `bind_socket`.
        """
        try:
            with self._handshakes_in_time():
                await super().startup(sockets)
        except OSError as error:
            raise _cannot_listen("the chosen address", error) from error
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuses new connections, waits for running requests, then ends the remaining ones."""
        if isinstance(self._app, Starlette):
            for end in self._app.state.on_drain:
                end()
        ender = asyncio.ensure_future(self._end_requests_when_late())
        try:
            await super().shutdown(sockets)
        finally:
            ender.cancel()
            await asyncio.gather(ender, return_exceptions=True)
            self._cut_connections()

    @contextlib.contextmanager
    def _handshakes_in_time(self) -> Iterator[None]:
        """Limits TLS handshakes to `request_timeout_s`, instead of asyncio's 60 s.

        uvicorn passes no such limit to `create_server`. So the method is replaced while uvicorn
        calls it.
        """
        if not self.config.is_ssl:
            yield
            return
        loop = asyncio.get_running_loop()
        loop.create_server = functools.partial(
            loop.create_server, ssl_handshake_timeout=self._request_timeout_s
        )
        try:
            yield
        finally:
            del loop.create_server

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's method, but does not raise the signal again after the drain.

        uvicorn does, which would kill the process instead of letting it return 0.
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
        """The first signal drains the server; a second one ends it immediately."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def _end_requests_when_late(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._shutdown_timeout_s
        while loop.time() < deadline and not self.force_exit:
            await asyncio.sleep(_FORCE_EXIT_POLL_S)
        if not self.force_exit:
            # Running requests end with EngineDeadError, which the handlers send to their clients.
            await self._engine.close(drain_timeout_s=0.0)
            await asyncio.sleep(_SEND_ERRORS_S)
        self._cut_connections()

    def _cut_connections(self) -> None:
        """Aborts the remaining connections; their handlers are cancelled without tracebacks."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _check_tls_files(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ValueError) as error:
        files = [config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs]
        raise ConfigError(
            f"HTTPS cannot be served with {', '.join(f for f in files if f is not None)}: {error}. "
            "Use PEM files: --ssl-certfile with the server's certificate first, and --ssl-keyfile "
            "with its private key, unless --ssl-certfile contains the key."
        ) from error


def _cannot_listen(where: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {where}: {error.strerror or error}. Choose another --host or --port."
    )
