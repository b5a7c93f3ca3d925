"""The port opens last; signals drain; a port that is taken is a clear error."""

import ast
import contextlib
import os
import re
import resource
import signal
import socket
import ssl
import threading
import time
from pathlib import Path

import httpx
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.errors import ConfigError
from paxkv.server.app import create_app
from paxkv.server.http_server import HttpServer, bind_socket, socket_url
from tests.killed_after import killed_after
from tests.paxkv.forked_processes import forked_processes
from tests.paxkv.server.conftest import PATIENCE_S
from tests.paxkv.server.fake_engine import FakeEngine

# Certificate of localhost and its private key, signed by itself, for a hundred years.
PEM = Path(__file__).with_name("self_signed.pem")


@pytest.fixture(scope="module")
def processes():
    with forked_processes("tests.paxkv.server.forked_server") as processes:
        yield processes


@pytest.fixture
def start_process(processes):
    """Starts a server; returns its process and address."""
    started = []

    def start(shutdown_timeout_s):
        process = processes.start_server([str(shutdown_timeout_s)], has_input=True)
        started.append(process)
        with killed_after(PATIENCE_S, process):
            return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.end()


def _say_seconds_per_token(process, seconds):
    process.stdin.write(f"{seconds}\n".encode())


def _wait_until_port_is_closed(url):
    """The drain has begun then."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            httpx.get(f"{url}/health", timeout=PATIENCE_S)
        except httpx.ConnectError:
            return
        except httpx.TransportError:
            pass  # it came in with the signal
        assert time.monotonic() < deadline


def _stream_in_thread(url, max_tokens):
    """Starts a stream, and returns when its first bytes are there; `lines` grows on."""
    lines, has_begun = [], threading.Event()

    def read():
        body = {"prompt": "a", "max_tokens": max_tokens, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S
        ) as response:
            for line in response.iter_lines():
                lines.append(line)
                has_begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(PATIENCE_S)
    return thread, lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_a_running_stream_finish_and_takes_no_new_one(start_process, number):
    process, url = start_process(600)
    thread, lines = _stream_in_thread(url, max_tokens=400)
    os.kill(process.pid, number)
    _wait_until_port_is_closed(url)
    assert "data: [DONE]" not in lines
    _say_seconds_per_token(process, 0)
    thread.join(PATIENCE_S)
    assert lines[-2:] == ["data: [DONE]", ""]
    assert sum(line.startswith("data: {") for line in lines) == 400
    assert process.wait(PATIENCE_S) == 0
    assert process.stdout.read() == "drained []\n"


def test_answers_in_the_background_end_when_the_port_closes(
    start_process,
):
    process, url = start_process(600)
    # It takes 20 seconds; the stream, for which the drain waits, more.
    body = {"input": "a", "max_output_tokens": 400, "background": True}
    response = httpx.post(f"{url}/v1/responses", json=body, timeout=PATIENCE_S)
    assert response.json()["status"] == "queued"
    thread, _ = _stream_in_thread(url, max_tokens=450)
    os.kill(process.pid, signal.SIGTERM)
    _wait_until_port_is_closed(url)
    _say_seconds_per_token(process, 0)
    thread.join(PATIENCE_S)
    assert process.wait(PATIENCE_S) == 0
    assert len(ast.literal_eval(process.stdout.read().removeprefix("drained "))) == 1


def test_a_stream_past_its_deadline_ends_with_an_error(start_process):
    process, url = start_process(0.3)
    thread, lines = _stream_in_thread(url, max_tokens=400)
    os.kill(process.pid, signal.SIGTERM)
    thread.join(PATIENCE_S)
    assert '"code":"engine_dead"' in lines[-2]
    assert process.wait(PATIENCE_S) == 0


def test_idle_server_ends_at_once(start_process):
    process, url = start_process(600)
    with httpx.Client(timeout=PATIENCE_S) as client:
        assert client.get(f"{url}/health").status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        # A drain would last ten times as long.
        assert process.wait(PATIENCE_S) == 0


def test_second_signal_does_not_wait(start_process):
    process, url = start_process(600)
    body = b'{"prompt": "a", "max_tokens": 400, "stream": true}'
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert connection.recv(10)
        _say_seconds_per_token(process, 3600)
        os.kill(process.pid, signal.SIGTERM)
        # Else the second signal might be one with the first.
        _wait_until_port_is_closed(url)
        time.sleep(0.3)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_client_that_never_reads_does_not_delay_the_drain(start_process):
    process, url = start_process(0.3)
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        # Too small for the answer, which therefore piles up in the server.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        prompts = ", ".join(['"a"'] * 250)
        body = b'{"prompt": [%s], "max_tokens": 400, "stream": true}' % prompts.encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGTERM)
        # 0.3 s of drain and 2 s for last words.
        assert process.wait(PATIENCE_S) == 0


def test_bound_port_refuses_connections_until_the_server_starts():
    with bind_socket(ServerConfig(port=0)) as bound:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound.getsockname(), timeout=PATIENCE_S).close()


def test_idle_connections_last_longer_than_those_of_clients_and_balancers():
    config = ServerConfig()
    engine = FakeEngine()
    server = HttpServer(create_app(engine, config), engine, config)
    # Who closes first decides: a request that meets the server's end of its connection is lost.
    assert server.config.timeout_keep_alive > 60


def test_taken_port_says_so():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*in use.*--port"):
            bind_socket(ServerConfig(port=port))


def test_unknown_host_says_so():
    with pytest.raises(ConfigError, match=r"cannot listen on 300\.0\.0\.1:8000"):
        bind_socket(ServerConfig(host="300.0.0.1"))


def test_url_names_the_port_that_was_picked():
    with bind_socket(ServerConfig(port=0)) as bound:
        assert socket_url(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert bound.getsockname()[1] > 0


def test_a_server_answers_with_its_own_certificate(start_server):
    server = start_server(ssl_certfile=str(PEM))
    assert server.url.startswith("https://127.0.0.1:")
    assert server.client.get("/version").status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/version", timeout=PATIENCE_S)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url.replace('https', 'http')}/version", timeout=PATIENCE_S)


def test_handshake_that_does_not_come_ends_in_time(start_server):
    # asyncio's own limit is a minute.
    server = start_server(ssl_certfile=str(PEM), request_timeout_s=30.0)
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(b"\x16\x03")
        server.pass_time(30.0)
        connection.settimeout(20.0)
        assert connection.recv(100) == b""
    assert server.client.get("/version").status_code == 200


def test_client_certificate_can_be_required(start_server):
    server = start_server(ssl_certfile=str(PEM), ssl_ca_certs=str(PEM), ssl_cert_reqs=2)
    with pytest.raises(httpx.HTTPError):
        server.client.get("/version")
    context = ssl.create_default_context(cafile=PEM)
    context.load_cert_chain(PEM)
    with httpx.Client(verify=context, timeout=PATIENCE_S) as client:
        assert client.get(f"{server.url}/version").status_code == 200


@pytest.mark.parametrize("setting", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
@pytest.mark.parametrize("text", [None, "no certificate"])
def test_bad_file_for_https_is_known_before_the_port(tmp_path, setting, text):
    path = tmp_path / "some.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"HTTPS cannot be served with .*some\.pem"):
        bind_socket(ServerConfig(port=0, **{"ssl_certfile": str(PEM), setting: str(path)}))


def test_too_many_connections_are_an_error_before_the_port_opens():
    with pytest.raises(ConfigError, match="--max-connections"):
        bind_socket(ServerConfig(port=0, max_connections=2**40))


# About 25 s; run with `pytest -m slow tests/paxkv/server/test_http_server.py`.
@pytest.mark.slow
def test_thousands_of_silent_connections_do_not_block_other_clients(start_process):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip(f"the hard limit of open files is {hard}; two processes need 12,000 each")
    # The server's process raises its own limit.
    process, url = start_process(5)
    host, port = url.removeprefix("http://").split(":")
    resource.setrlimit(resource.RLIMIT_NOFILE, (12_000, hard))
    try:
        with contextlib.ExitStack() as stack:
            for i in range(10_000):
                connection = stack.enter_context(socket.create_connection((host, int(port))))
                if i % 2:
                    connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
            assert _open_files(url) >= 10_000
            start = time.monotonic()
            body = {"prompt": "a", "max_tokens": 5}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).is_success
            assert time.monotonic() - start < 10
            # Each has 15 s for its request.
            deadline = time.monotonic() + 25
            while _open_files(url) > 100:
                assert time.monotonic() < deadline
                time.sleep(1)
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.poll() is None


def _open_files(url):
    text = httpx.get(f"{url}/metrics", timeout=20).text
    return float(re.search(r"^process_open_fds (\S+)$", text, re.M).group(1))
