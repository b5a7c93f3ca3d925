"""The client streams a server's answer, and reports errors."""

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.cli.chat_client import ChatClient, ChatError
from tests.paxkv.server.conftest import run_server
from tests.paxkv.server.fake_engine import (
    DIE_AFTER_3,
    MODEL_NAME,
    FakeEngine,
    FakeTokenizer,
    answer_token_ids,
)

USER = {"role": "user", "content": "hi"}
PEM = Path(__file__).parents[2] / "server" / "self_signed.pem"


@pytest.fixture
def start():
    """Starts servers; returns the client's arguments."""
    with contextlib.ExitStack() as stack:

        def run(**settings):
            config = ServerConfig(port=0, shutdown_timeout_s=1.0, **settings)
            engine = FakeEngine(seconds_per_token=0.05)
            return stack.enter_context(run_server(engine, config))

        yield run


def _expected(max_tokens):
    prompt = FakeTokenizer().encode("<user>hi<assistant>", add_special_tokens=False)
    return "".join(map(chr, answer_token_ids(prompt, max_tokens)))


def test_joined_parts_are_the_answer(start):
    client = ChatClient(f"{start().url}/v1")
    assert client.first_model() == MODEL_NAME
    parts = list(client.stream(MODEL_NAME, [USER], max_tokens=5))
    assert len([part for part in parts if part]) == 5
    assert "".join(parts) == _expected(5)


def test_client_supports_https_and_an_api_key(start):
    url = f"{start(ssl_certfile=str(PEM), api_key=('k1', 'k2')).url}/v1/"
    client = ChatClient(url, api_key="k2", ca_certs=str(PEM))
    assert "".join(client.stream(MODEL_NAME, [USER], max_tokens=2)) == _expected(2)
    with pytest.raises(ChatError, match="401: the API key is missing or wrong"):
        ChatClient(url, ca_certs=str(PEM)).first_model()
    with pytest.raises(ChatError, match="CERTIFICATE_VERIFY_FAILED"):
        ChatClient(url, api_key="k2").first_model()


def test_error_contains_the_message_of_the_server(start):
    client = ChatClient(f"{start().url}/v1")
    with pytest.raises(ChatError, match="404.*other"):
        next(client.stream("other", [USER]))
    stream = client.stream(MODEL_NAME, [{"role": "user", "content": DIE_AFTER_3}])
    with pytest.raises(ChatError, match="the engine has ended"):
        list(stream)


def test_stopped_answer_is_aborted_in_the_server(start):
    server = start()
    stream = ChatClient(f"{server.url}/v1").stream(MODEL_NAME, [USER], max_tokens=400)
    next(stream)
    stream.close()
    for _ in range(6000):
        if server.engine.aborted:
            break
        threading.Event().wait(0.01)
    assert len(server.engine.aborted) == 1


def test_missing_server_or_early_end_is_an_error():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with pytest.raises(ChatError, match="cannot be reached"):
            ChatClient(url).first_model()
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            with connection:
                # Read everything, because closing with unread bytes would break the connection.
                data = b""
                while not data.endswith(b"}"):
                    data += connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ChatError, match="ended in the middle"):
            list(ChatClient(url).stream("m", [USER]))
        thread.join()


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000/v1", "ftp://x/v1", "http:///v1"),
        *("http://127.0.0.1:99999/v1", "http://127.0.0.1:x/v1", "http://[::1/v1"),
    ],
)
def test_invalid_url_is_rejected(url):
    with pytest.raises(ChatError, match="--url must be"):
        ChatClient(url)


def test_invalid_key_and_unreadable_certificates_are_rejected(tmp_path):
    for key in ("a\nb", "ключ"):
        with pytest.raises(ChatError, match="--api-key must be"):
            ChatClient("http://127.0.0.1:1/v1", api_key=key)
    (tmp_path / "empty.pem").touch()
    for name in ("empty.pem", "missing.pem"):
        with pytest.raises(ChatError, match=f"--ssl-ca-certs must be .*{name}"):
            ChatClient("https://127.0.0.1:1/v1", ca_certs=str(tmp_path / name))
