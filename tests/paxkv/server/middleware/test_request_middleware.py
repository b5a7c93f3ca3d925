"""Handlers are cancelled when their client leaves, and only then; what a path may look like."""

import asyncio
import contextlib
import http.client

import pytest

from paxkv.server.middleware.request_middleware import (
    DisconnectMiddleware,
    HeaderLimitMiddleware,
    RequestIdMiddleware,
)

SCOPE = {"type": "http", "headers": []}
START = {"type": "http.response.start", "status": 200, "headers": []}


class Connection:
    """A client that sends a body in two parts, and disconnects when a test asks."""

    def __init__(self):
        self.messages = asyncio.Queue()
        self.sent = []
        for more_body in (True, False):
            self.messages.put_nowait({"type": "http.request", "body": b"x", "more_body": more_body})

    def leave(self):
        self.messages.put_nowait({"type": "http.disconnect"})

    async def receive(self):
        return await self.messages.get()

    async def send(self, message):
        self.sent.append(message)


async def _read_body(receive):
    while (await receive()).get("more_body"):
        pass


def test_handler_of_a_client_that_left_is_cancelled():
    async def run():
        connection, seen = Connection(), []

        async def handler(scope, receive, send):
            await _read_body(receive)
            connection.leave()
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        await DisconnectMiddleware(handler)(SCOPE, connection.receive, connection.send)
        assert seen == ["cancelled"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_handler_that_waits_for_the_disconnect_itself_is_cancelled():
    async def run():
        connection = Connection()

        async def handler(scope, receive, send):
            await _read_body(receive)
            connection.leave()
            await receive()

        await DisconnectMiddleware(handler)(SCOPE, connection.receive, connection.send)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_disconnect_after_the_last_byte_lets_the_handler_tidy_up():
    async def run():
        connection, seen = Connection(), []

        async def handler(scope, receive, send):
            await _read_body(receive)
            await send(START)
            await send({"type": "http.response.body", "body": b"done"})
            connection.leave()
            await asyncio.sleep(0.02)
            seen.append("tidy")

        await DisconnectMiddleware(handler)(SCOPE, connection.receive, connection.send)
        assert seen == ["tidy"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_error_of_the_handler_comes_through():
    async def handler(scope, receive, send):
        raise RuntimeError("of the handler")

    async def run():
        connection = Connection()
        await DisconnectMiddleware(handler)(SCOPE, connection.receive, connection.send)

    with pytest.raises(RuntimeError, match="of the handler"):
        asyncio.run(run())


def test_cancelling_the_exchange_cancels_the_handler_first():
    async def run():
        connection, seen = Connection(), []

        has_begun = asyncio.Event()

        async def handler(scope, receive, send):
            has_begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.01)
                seen.append("closed")

        exchange = asyncio.ensure_future(
            DisconnectMiddleware(handler)(SCOPE, connection.receive, connection.send)
        )
        await has_begun.wait()
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange
        assert seen == ["closed"]

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [(b"mine-1", True), (b"", False), (b"x" * 129, False), (b"a\tb", False), (b"\xe9", False)],
)
def test_request_id_is_echoed_when_it_can_be_a_header(given, is_kept):
    async def run():
        connection = Connection()
        scope = {"type": "http", "headers": [(b"x-request-id", given)]}

        async def handler(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})

        await RequestIdMiddleware(handler)(scope, connection.receive, connection.send)
        ((_, value),) = connection.sent[0]["headers"]
        assert value.decode() == scope["state"]["request_id"]
        assert (value == given) == is_kept
        assert is_kept or len(value) == 32

    asyncio.run(run())


def _status_of(server, target):
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", target)
        return connection.getresponse().status


def test_a_whole_url_in_place_of_a_path_is_understood(start_server):
    server = start_server(api_key=("key",))
    assert _status_of(server, "http://anywhere:80/version?a=b") == 200
    assert _status_of(server, "HTTPS://anywhere/v1/models") == 401
    assert _status_of(server, "http://anywhere") == 200
    assert _status_of(server, "http://anywhere/nothing") == 404


@pytest.mark.parametrize(
    ("most", "num_headers", "status"), [(None, 99, 200), (3, 3, 200), (3, 4, 431)]
)
def test_headers_may_be_limited_in_number(most, num_headers, status):
    async def run():
        connection = Connection()

        async def handler(scope, receive, send):
            await send(START)

        limited = HeaderLimitMiddleware(handler, max_header_bytes=4096, max_header_count=most)
        scope = {"type": "http", "headers": [(b"a", b"b")] * num_headers}
        await limited(scope, connection.receive, connection.send)
        return connection.sent

    first, *rest = asyncio.run(run())
    assert first["status"] == status
    if status == 431:
        assert b"has 4 headers; this server takes at most 3" in rest[0]["body"]
