"""uvicorn's HTTP protocol, with a deadline by which a whole request must have arrived."""

import asyncio
import http
import logging
import re
import sys

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from paxkv.server.protocol.anthropic.errors import anthropic_error
from paxkv.server.protocol.error_response import error_body
from paxkv.server.protocol.request_names import new_request_id, request_id_of
from paxkv.server.routes.messages import MESSAGES_PATH
from paxkv.server.routes.route_path import is_below, route_path

logger = logging.getLogger(__name__)
# Hides uvicorn's warnings. Those about requests that are not HTTP do not name the client, and those
# about ignored `Upgrade` headers advise the user to install a package.
_uvicorn_logger = logger.getChild("uvicorn")
_uvicorn_logger.setLevel(logging.ERROR)
_FIRST_LINE = re.compile(rb"[A-Z]+ ([!-~]+) HTTP/1\.[01]\r?\n")
# The path, which decides the format of errors, is read only from first lines up to this length.
_MAX_FIRST_LINE_BYTES = 1024
# Removes a secret from "illegal header line: bytearray(b'Authorization Bearer ...')".
_QUOTED_BYTES = re.compile(r":? (bytearray\(b|b)['\"].*", re.DOTALL)


def deadline_protocol(
    request_timeout_s: float, *, max_connections: int | None = None, root_path: str = ""
) -> type[H11Protocol]:
    """Makes a protocol class for `uvicorn.Config(http=...)`, with these settings as attributes.

    Args:
        max_connections: A further connection gets a 503 and is closed; None is no limit.
        root_path: The proxy's path prefix, as in `ServerConfig`.
    """
    settings = {
        "request_timeout_s": request_timeout_s,
        "max_connections": max_connections,
        "proxy_path": root_path,
    }
    return type("BoundDeadlineProtocol", (DeadlineProtocol,), settings)


class OpenTransport:
    """A transport that drops what is written after it began to close.

    uvicorn learns that a client has disconnected only at the loop's next turn. Until then, it
    writes the remaining pieces of a response, and asyncio would log a warning for each.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class DeadlineProtocol(H11Protocol):
    """Gives a client `request_timeout_s` from its first byte to the last byte of its request.

    uvicorn limits the idle time between requests, but not the time in which a request arrives. More
    bytes do not extend the deadline, so that a client that sends one byte per second cannot keep a
    connection open.

    The same limit applies to a client that does not read its answer. Otherwise its request would
    never end.
    """

    request_timeout_s = 15.0
    max_connections: int | None = None
    # Not called `root_path`, which is an attribute of uvicorn's class.
    proxy_path = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.logger = _uvicorn_logger
        super().connection_made(transport)
        self.transport = OpenTransport(transport)
        # The first bytes of the request that is being read.
        self._head = b""
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            self._refuse(503, f"the server has {self.max_connections} connections open already.")
            return
        # The deadline also applies to a connection that never sends a byte.
        self._keep_deadline()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            # Kept here, because h11 drops bytes that it cannot parse.
            self._head = (self.conn.trailing_data[0] + data)[:_MAX_FIRST_LINE_BYTES]
        super().data_received(data)
        self._keep_deadline()

    def on_response_complete(self) -> None:
        self._head = self.conn.trailing_data[0][:_MAX_FIRST_LINE_BYTES]
        super().on_response_complete()
        # uvicorn continues with bytes that arrived after the answered request. They may be only a
        # part of a request. Without such bytes, uvicorn's limit for idle connections applies.
        if self.conn.their_state is h11.SEND_BODY:
            self._keep_deadline()

    def pause_writing(self) -> None:
        """Called when the client has not read enough of what was written."""
        super().pause_writing()
        self._drop_write_deadline()
        self._write_deadline = self.loop.call_later(self.request_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Called when the client has read most of what was written."""
        super().resume_writing()
        self._drop_write_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_deadline()
        self._drop_write_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not valid HTTP, or whose headers are too long."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            status, message = 431, "the request's first line and headers are too long."
        else:
            reason = _QUOTED_BYTES.sub("", str(error or msg))
            status, message = 400, f"the request is not valid HTTP/1.1: {reason}."
        host, port = (self.client or ("-", 0))[:2]
        request_id = self._request_id()
        if self._has_begun_to_answer():
            logger.warning("%s:%d is closed, as its answer had begun: %s", host, port, message)
        else:
            logger.warning(
                "%s:%d is refused with %d: %s Id %s", host, port, status, message, request_id
            )
        self._refuse(status, message, request_id=request_id)

    def _keep_deadline(self) -> None:
        is_waiting = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not is_waiting or self.transport.is_closing():
            self._drop_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.request_timeout_s, self._on_deadline)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:
            # If the handler still waits for the body, it sees a disconnect.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        has_sent_something = bool(self.conn.trailing_data[0]) or (
            self.conn.their_state is h11.SEND_BODY
        )
        if has_sent_something:
            self._refuse(
                408, f"the request did not arrive whole within {self.request_timeout_s:g} s."
            )
        else:
            self.transport.close()

    def _has_begun_to_answer(self) -> bool:
        return self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    def _request_id(self) -> str:
        """The id of the request that is being served; a new one if none is."""
        if self.cycle is None or self.cycle.response_complete:
            return new_request_id()
        return request_id_of(self.scope)

    def _path(self) -> str | None:
        """The path of the request that is being read or served, if its first line has arrived."""
        if self.cycle is not None and not self.cycle.response_complete:
            path = self.scope["path"]
        else:
            first_line = _FIRST_LINE.match(self._head)
            if first_line is None:
                return None
            path = first_line[1].partition(b"?")[0].decode("ascii")
        return route_path({"path": path, "root_path": self.proxy_path})

    def _error_body(self, status: int, message: str, request_id: str) -> tuple[int, bytes]:
        """Status and body of an error, in the format of the API that the path belongs to."""
        body, path = error_body(status, message), self._path()
        if path is not None and is_below(path, MESSAGES_PATH):
            status, error = anthropic_error(status, body, request_id=request_id)
            body = msgspec.json.encode(error)
        return status, body

    def _refuse(self, status: int, message: str, *, request_id: str | None = None) -> None:
        """Answers and closes the connection; only closes it if an answer has already begun.

        Args:
            request_id: `_request_id()` if left out.
        """
        if self._has_begun_to_answer():
            self.transport.close()
            return
        request_id = request_id or self._request_id()
        status, body = self._error_body(status, message, request_id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode("ascii")),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode("ascii")),
        ]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        reason = http.HTTPStatus(status).phrase
        for event in (
            h11.Response(status_code=status, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()
