"""The server answers a request with two lengths, and then reads no further request after it."""

import asyncio
import socket

import pytest

from paxkv.server.middleware.disputed_length import DisputedLengthMiddleware
from tests.paxkv.server.conftest import PATIENCE_S

BODY = b'{"prompt": "a", "max_tokens": 1}'
# Closes the connection, if it is answered at all.
NEXT = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def exchange(server, headers, body, *, path=b"/v1/completions"):
    """Everything that the server sends for two requests on one connection, until it closes."""
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(head + headers + b"\r\n" + body + NEXT)
        with connection.makefile("rb") as reader:
            return reader.read()


CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"transfer-encoding: Chunked\r\ncontent-length: %d\r\n" % len(CHUNKED),
    ],
)
def test_two_lengths_are_answered_once_and_the_connection_closes(shared_server, headers):
    answer = exchange(shared_server, headers, CHUNKED)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1


def test_a_refusal_closes_the_connection_too(shared_server):
    headers = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    answer = exchange(shared_server, headers, CHUNKED, path=b"/nothing")
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (b"Content-Length: %d\r\n" % len(BODY), BODY),
        (b"Transfer-Encoding: chunked\r\n", CHUNKED),
    ],
)
def test_one_length_keeps_the_connection(shared_server, headers, body):
    answer = exchange(shared_server, headers, body)
    assert answer.count(b"HTTP/1.1 200") == 2


def test_other_scopes_pass_unchanged():
    seen = []

    async def app(scope, receive, send):
        seen.append((scope, receive, send))

    asyncio.run(DisputedLengthMiddleware(app)({"type": "lifespan"}, 1, 2))
    assert seen == [({"type": "lifespan"}, 1, 2)]
