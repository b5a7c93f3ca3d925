"""One line a request, with what an operator asks for, and nothing that a client smuggles in."""

import re
import socket
import time

import pytest

from paxkv.server.middleware import access_log
from tests.paxkv.server.conftest import PATIENCE_S
from tests.paxkv.server.fake_engine import FAIL_AFTER_3, NO_TOKENS

LINE = re.compile(
    r'127\.0\.0\.1:\d+ "(?P<request>[^"]*)" (?P<status>\d+) in (?P<total>[\d.]+) ms, '
    r"first byte after (?P<first>[\d.]+) ms, id (?P<id>.*)"
)


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", logger=access_log.__name__)

    def read(num_lines):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = [r.getMessage() for r in caplog.records if r.name == access_log.__name__]
            if len(found) >= num_lines:
                assert len(found) == num_lines
                return [LINE.fullmatch(line) for line in found]
            assert time.monotonic() < deadline, found
            time.sleep(0.01)

    return read


def test_line_names_request_status_times_and_id(start_server, lines):
    server = start_server(seconds_per_token=0.02)
    body = {"prompt": "a", "max_tokens": 5, "stream": True}
    server.client.post("/v1/completions?secret=1", json=body, headers={"X-Request-Id": "mine"})
    server.client.get("/nothing")
    stream, unknown = lines(2)
    assert stream["request"] == "POST /v1/completions"
    assert (stream["status"], stream["id"]) == ("200", "mine")
    # One token before the first byte, four behind it; less what a clock may be off.
    assert 19 < float(stream["first"]) < float(stream["total"]) - 4 * 19
    assert (unknown["request"], unknown["status"]) == ("GET /nothing", "404")
    assert len(unknown["id"]) == 32


def test_client_that_left_and_a_bug_have_their_status(start_server, lines):
    server = start_server()
    server.client.post("/v1/completions", json={"prompt": FAIL_AFTER_3})
    body = b'{"prompt": "%s"}' % NO_TOKENS.encode()
    with socket.create_connection(server.address) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        while not server.engine.running:
            time.sleep(0.005)
    assert [line["status"] for line in lines(2)] == ["500", "499"]


def test_path_cannot_forge_a_line(start_server, lines):
    server = start_server()
    server.client.get("/a%0a127.0.0.1%22b")
    (line,) = lines(1)
    assert line["request"] == "GET /a%0a127.0.0.1%22b"


@pytest.mark.parametrize(
    ("request_target", "logged"),
    [
        ("GET http://user:secret@host/nothing", "GET /nothing"),
        ("GET ftp://user:sec@ret@host/a@b", "GET -"),
        ("GET //user:secret@host/a", "GET -"),
        ("GET http:/user:secret@host/a", "GET -"),
        ("GET ftp://user:sec?ret@host/a", "GET -"),
        ("GET http://user:sec?ret@host/a", "GET /"),
        ("CONNECT user:secret@host:443", "CONNECT -"),
        ("GET /a/user:known@host", "GET /a/user:known@host"),
    ],
)
def test_the_log_line_has_no_user_and_no_password(start_server, lines, request_target, logged):
    server = start_server()
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(request_target.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        (line,) = lines(1)
    # The front page is at "/".
    assert (line["request"], line["status"]) == (logged, "200" if logged == "GET /" else "404")


def test_paths_and_the_whole_log_can_be_left_out(start_server, lines):
    server = start_server(disable_access_log_for_endpoints="/health, /metrics", root_path="/api")
    for path in ("/health", "/api/metrics", "/api/version"):
        assert server.client.get(path).status_code == 200
    (line,) = lines(1)
    assert line["request"] == "GET /api/version"
    silent = start_server(disable_uvicorn_access_log=True)
    silent.client.get("/version")
    lines(1)
