"""Half a request and then silence, or a drip: the connection ends, and others are served."""

import asyncio
import contextlib
import json
import logging
import re
import socket
import struct

import pytest
import uvicorn
from uvicorn.server import ServerState

from paxkv.server.middleware.deadline_protocol import DeadlineProtocol, deadline_protocol
from tests.paxkv.server.conftest import PATIENCE_S, wait_until

# Seconds of the server's clock, which these tests move.
TIMEOUT_S = 60.0
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n"
)


@pytest.fixture
def server(start_server):
    return start_server(request_timeout_s=TIMEOUT_S)


def _read_to_end(connection):
    """Everything the server sends until it closes."""
    with connection.makefile("rb") as reader:
        return reader.read()


def _read_what_is_over(connection):
    """The same where it has closed already: `pass_time` returns behind what was due.

    Soon, since by the clock of the machine too a wrong deadline would come.
    """
    connection.settimeout(5)
    return _read_to_end(connection)


def _read_answer(connection):
    """One answer, of a connection that stays open."""
    with connection.makefile("rb") as reader:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = reader.readline()
            assert line, head
            head += line
        (length,) = re.findall(rb"content-length: (\d+)", head.lower())
        return head + reader.read(int(length))


def _assert_is_open(connection):
    """And nothing has come."""
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.recv(1)
    connection.settimeout(PATIENCE_S)


def _request_id(head):
    """The one `X-Request-Id` of an answer."""
    (request_id,) = re.findall(rb"x-request-id: (\S+)", head.lower())
    return request_id.decode()


def _assert_is_408(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert _request_id(head)
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert "within 60 s" in error["message"]
    assert error["type"] == "invalid_request_error"


async def _serve_one(app):
    """One request of a client that does not read, on this loop."""
    config = uvicorn.Config(app, log_config=None)
    config.load()
    bound = deadline_protocol(5.0)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: bound(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
    )
    async with listener:
        address = listener.sockets[0].getsockname()
        with socket.create_connection(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await app.is_done(client)


class _Burst:
    """An application that writes many pieces in one go, to a client that vanishes before them."""

    def __init__(self):
        self._client = asyncio.get_running_loop().create_future()
        self._is_done = asyncio.Event()

    async def is_done(self, client):
        self._client.set_result(client)
        await self._is_done.wait()

    async def __call__(self, scope, receive, send):
        client = await self._client
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # The connection is reset: later writes fail.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        for _ in range(40):
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self._is_done.set()


def test_nothing_is_written_to_a_client_that_is_known_to_have_gone(caplog):
    async def run():
        await _serve_one(_Burst())

    with caplog.at_level(logging.WARNING, "asyncio"):
        asyncio.run(run())
    assert caplog.messages == []


def test_bound_class_carries_its_timeout():
    assert deadline_protocol(3.5).request_timeout_s == 3.5
    assert issubclass(deadline_protocol(3.5), DeadlineProtocol)


@pytest.mark.parametrize(
    "part",
    [b"POST /v1", HEAD, HEAD + b"\r\n", HEAD + b'\r\n{"prompt": "a', HEAD[:-2]],
)
def test_half_a_request_is_408(server, part):
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(part)
        server.pass_time(0.5 * TIMEOUT_S)
        _assert_is_open(connection)
        server.pass_time(0.5 * TIMEOUT_S)
        answer = _read_what_is_over(connection)
    _assert_is_408(answer)
    assert server.client.get("/health").status_code == 200
    assert not server.engine.seen_prompts


@pytest.mark.parametrize("seconds_per_token", [0.0, 0.1])
def test_half_a_request_behind_a_whole_one_is_408(start_server, seconds_per_token):
    server = start_server(request_timeout_s=TIMEOUT_S, seconds_per_token=seconds_per_token)
    body = b'{"prompt": "a", "max_tokens": 2}'
    whole = HEAD.replace(b"100", str(len(body)).encode()) + b"\r\n" + body
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(whole + HEAD + b'\r\n{"prompt": "a')
        assert _read_answer(connection).startswith(b"HTTP/1.1 200")
        server.pass_time(0.5 * TIMEOUT_S)
        _assert_is_open(connection)
        server.pass_time(0.5 * TIMEOUT_S)
        answer = _read_what_is_over(connection)
    _assert_is_408(answer)
    assert len(server.engine.seen_prompts) == 1


def test_connection_without_a_byte_is_closed(server):
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        server.pass_time(0.5 * TIMEOUT_S)
        _assert_is_open(connection)
        server.pass_time(0.5 * TIMEOUT_S)
        assert _read_what_is_over(connection) == b""


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\n", HEAD + b"\r\n"])
def test_single_bytes_do_not_extend_the_deadline(server, start):
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(start)
        for _ in range(2):
            connection.sendall(b"x")
            server.pass_time(0.3 * TIMEOUT_S)
            _assert_is_open(connection)
        connection.sendall(b"x")
        server.pass_time(0.4 * TIMEOUT_S)
        _assert_is_408(_read_what_is_over(connection))


def test_an_unread_body_has_a_deadline_too(server):
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(HEAD.replace(b"/v1/completions", b"/nothing") + b"\r\n")
        assert _read_answer(connection).startswith(b"HTTP/1.1 404")
        server.pass_time(TIMEOUT_S)
        assert _read_what_is_over(connection) == b""


def test_whole_request_may_be_answered_after_the_deadline(start_server):
    server = start_server(request_timeout_s=TIMEOUT_S, seconds_per_token=0.8 * TIMEOUT_S)
    body = b'{"prompt": "a", "max_tokens": 2}'
    whole = HEAD.replace(b"100", str(len(body)).encode()) + b"\r\n" + body
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        # Once more on the same connection, which has been open for longer than the deadline.
        for _ in range(2):
            connection.sendall(whole)
            wait_until(lambda: server.engine.running)
            for _ in range(2):
                _assert_is_open(connection)
                server.pass_time(0.8 * TIMEOUT_S)
            assert _read_answer(connection).startswith(b"HTTP/1.1 200")


def test_each_request_of_a_connection_has_its_own_deadline(server):
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        request = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(3):
            connection.sendall(request)
            assert _read_answer(connection).startswith(b"HTTP/1.1 200")
            server.pass_time(0.6 * TIMEOUT_S)
        connection.sendall(request[:10])
        server.pass_time(0.6 * TIMEOUT_S)
        _assert_is_open(connection)
        server.pass_time(0.4 * TIMEOUT_S)
        answer = _read_what_is_over(connection)
    _assert_is_408(answer)


@pytest.mark.parametrize(("path", "status"), [(b"/nothing", b"404"), (b"/v1/completions", b"415")])
def test_garbage_after_an_early_answer_closes_quietly(server, caplog, path, status):
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(head + b"1\r\na\r\n")
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 " + status)
        connection.sendall(b"no chunk\r\n")
        rest = _read_to_end(connection)
        host, port = connection.getsockname()
    # One request, one answer, and one line in the log, which says so.
    assert b"HTTP/1.1" not in rest
    reason = "the request is not valid HTTP/1.1: illegal chunk header"
    assert caplog.messages == [f"{host}:{port} is closed, as its answer had begun: {reason}."]


# What is wrong with a request before the application has it, or while it waits for the body.
_BAD_REQUESTS = {
    "a header without a name": (b"Content-Length: 5\r\nno name\r\n\r\n", b"400"),
    "no chunk": (b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n", b"400"),
    "headers too long": (b"X-Long: " + b"a" * 1500, b"431"),
    "half a body": (b"Content-Type: application/json\r\nContent-Length: 5\r\n\r\n{", b"408"),
    "half a head": (b"Content-Type: application/json\r\n", b"408"),
}


@pytest.mark.parametrize("path", [b"/v1/messages", b"/api/v1/messages/count_tokens?beta=true"])
@pytest.mark.parametrize("case", _BAD_REQUESTS)
def test_errors_below_the_application_have_the_form_of_the_path(start_server, case, path):
    rest, status = _BAD_REQUESTS[case]
    server = start_server(request_timeout_s=TIMEOUT_S, max_header_bytes=1000, root_path="/api")
    for sent_path, is_anthropic in ((path, True), (b"/v1/completions", False)):
        with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
            connection.sendall(b"POST " + sent_path + b" HTTP/1.1\r\nHost: x\r\n" + rest)
            if status == b"408":
                server.pass_time(TIMEOUT_S)
            answer = _read_what_is_over(connection)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status), answer
        found = json.loads(body)
        assert ("param" in found["error"]) != is_anthropic
        if is_anthropic:
            kind = "timeout_error" if status == b"408" else "invalid_request_error"
            assert (found["type"], found["error"]["type"]) == ("error", kind)
            assert found["request_id"] == _request_id(head)


def test_an_error_has_the_form_of_its_own_path(server):
    before = b"GET /v1/messages HTTP/1.1\r\nHost: x\r\n\r\n"
    for bad in (b"garbage\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nno name\r\n\r\n"):
        for in_one in (False, True):
            with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
                connection.sendall(before + bad * in_one)
                if not in_one:
                    assert _read_answer(connection).startswith(b"HTTP/1.1 405")
                    connection.sendall(bad)
                answer = _read_to_end(connection)
            assert b"HTTP/1.1 400" in answer and b'"param"' in answer


def _head_with_headers(num_bytes):
    start, end = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: ", b"\r\n\r\n"
    return start + b"a" * (num_bytes - len(start) - len(end)) + end


@pytest.mark.parametrize("in_pieces", [False, True])
def test_headers_over_the_limit_are_431(start_server, in_pieces):
    server = start_server(max_header_bytes=1000)
    head = _head_with_headers(1100)
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        # What is not complete is refused by h11, what comes whole by us.
        connection.sendall(head[:1050] if in_pieces else head)
        connection.shutdown(socket.SHUT_WR)
        answer = _read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert _request_id(answer.partition(b"\r\n\r\n")[0])
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(_head_with_headers(900))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_connection_over_the_limit_gets_an_error_and_is_closed(start_server):
    # One that is not closed at once stays open for longer than anybody here reads.
    server = start_server(max_connections=2, request_timeout_s=10 * PATIENCE_S)
    with socket.create_connection(server.address, timeout=PATIENCE_S) as first:
        with socket.create_connection(server.address, timeout=PATIENCE_S) as second:
            first.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert first.recv(4096).startswith(b"HTTP/1.1 200")
            second.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert second.recv(4096).startswith(b"HTTP/1.1 200")
            with socket.create_connection(server.address, timeout=PATIENCE_S) as third:
                answer = _read_to_end(third)
            assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert _request_id(answer)
            assert b"retry-after: 1" in answer.lower()
            assert b"2 connections open already" in answer
    assert server.client.get("/health").status_code == 200


def test_silent_connections_do_not_keep_others_out(start_server):
    server = start_server(request_timeout_s=10 * PATIENCE_S)
    connections = [socket.create_connection(server.address, timeout=PATIENCE_S) for _ in range(300)]
    try:
        assert server.client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 2}
        ).is_success
    finally:
        for connection in connections:
            connection.close()


def test_a_client_that_does_not_read_its_answer_is_dropped(start_server):
    server = start_server(request_timeout_s=TIMEOUT_S, max_body_bytes=4_000_000)
    body = json.dumps({"prompt": "a" * 3_900_000}).encode()
    head = (
        "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(server.address)
        connection.sendall(head.encode() + body)
        # The whole request was there.
        num_bytes = len(connection.recv(1))
        (dropped,) = server.connections
        # It has as long to take the answer, from when that is written.
        for _ in range(1000):
            server.pass_time(TIMEOUT_S)
            if dropped not in server.connections:
                break
        assert dropped not in server.connections
        with contextlib.suppress(ConnectionResetError):
            while received := connection.recv(2**20):
                num_bytes += len(received)
    # "97," for every letter.
    assert num_bytes < 3 * 3_900_000
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\x16\x03\x01 hello\r\n\r\n", "illegal request line"),
        (b"GET /version HTTP/1.1\r\n\r\n", "Missing mandatory Host: header"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nKey secret\r\n\r\n", "illegal header line"),
    ],
)
def test_request_that_is_not_http_is_400_and_logs_client_and_reason(server, caplog, sent, reason):
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        host, port = connection.getsockname()
        connection.sendall(sent)
        answer = _read_to_end(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    error = json.loads(body)["error"]
    assert error["message"] == f"the request is not valid HTTP/1.1: {reason}."
    assert error["type"] == "invalid_request_error"
    refusal = f"{host}:{port} is refused with 400: {error['message']} Id {_request_id(head)}"
    assert caplog.messages == [refusal]


@pytest.mark.parametrize("name", [b"mine", None])
def test_an_error_in_the_body_has_the_id_of_its_request(server, caplog, name):
    caplog.set_level(logging.INFO, logger="paxkv.server.middleware.access_log")
    head = HEAD.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked")
    if name is not None:
        head += b"X-Request-Id: " + name + b"\r\n"
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        # In one piece: the handler has not begun when the protocol finds the error.
        connection.sendall(head + b"\r\n" + b"no chunk\r\n")
        answer = _read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    request_id = _request_id(answer)
    assert request_id == "mine" if name is not None else len(request_id) == 32
    # The line of the access log names the same request.
    wait_until(lambda: any(f"id {request_id}" in message for message in caplog.messages))


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_upgrade_header_is_ignored(server, caplog, protocol):
    headers = {"Connection": "Upgrade", "Upgrade": protocol}
    assert server.client.get("/version", headers=headers).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
