"""A streaming client of /v1/chat/completions that needs only the standard library."""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self
from urllib.parse import SplitResult, urlsplit

from paxkv.errors import PaxkvError


class ChatError(PaxkvError):
    """The server cannot be reached, or it rejects a request."""


class ChatClient:
    """A client of one server, with a new connection for each call.

    Args:
        url: URL of the API, including /v1.
        api_key: API key; empty if the server needs none.
        ca_certs: PEM file of the authority that signed the server's certificate; None for the
            system's trusted authorities.
        timeout_s: Longest time without data, also before the first token.

    Raises:
        ChatError: An argument is invalid.
    """

    def __init__(
        self, url: str, *, api_key: str = "", ca_certs: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self._parts = _split(url)
        # HTTP headers cannot contain other characters.
        if not (api_key.isascii() and api_key.isprintable()):
            raise ChatError("--api-key must be printable ASCII characters.")
        self._api_key = api_key
        self._tls = None if self._parts.scheme == "http" else _tls_context(ca_certs)
        self._timeout_s = timeout_s

    def first_model(self) -> str:
        """The name of the server's first model.

        Raises:
            ChatError: The server cannot be reached, or rejects the request.
        """
        with self._send("GET", "/models", None) as response:
            models = json.loads(response.read())["data"]
        if not models:
            raise ChatError("the server has no model.")
        return models[0]["id"]

    def stream(
        self, model: str, messages: Sequence[Mapping[str, str]], **params: float | int
    ) -> Iterator[str]:
        """Yields parts of the answer's text as they arrive.

        Raises:
            ChatError: The server cannot be reached, rejects the request, or ends the answer early.
        """
        body = {"model": model, "messages": list(messages), "stream": True} | params
        with self._send("POST", "/chat/completions", json.dumps(body).encode()) as response:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    yield _text_of(json.loads(data))
        raise ChatError("the server ended in the middle of its answer.")

    def _send(self, method: str, path: str, body: bytes | None) -> "_Response":
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        connection = self._connect()
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_refusal(response))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(f"{self._parts.netloc} cannot be reached: {error}.") from error
        except ChatError:
            connection.close()
            raise
        return _Response(connection, response)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname, self._parts.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        # Reading `port` raises ValueError for invalid ports.
        is_known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_known = False
    if not is_known:
        raise ChatError(f"--url must be a URL such as http://127.0.0.1:8000/v1, got {url!r}.")
    return parts


def _tls_context(ca_certs: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_certs)
    except OSError as error:
        raise ChatError(
            f"--ssl-ca-certs must be a PEM file of certificates, got {ca_certs!r}: {error}."
        ) from error


class _Response:
    """A response and its connection, which are closed together."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self._response = response

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _exc_type: type[BaseException] | None,
        _exc: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    def read(self) -> bytes:
        return self._response.read()

    def __iter__(self) -> Iterator[bytes]:
        """Yields the lines of the response.

        Raises:
            ChatError: The connection broke.
        """
        try:
            yield from self._response
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection broke: {error}.") from error


def _text_of(event: dict[str, object]) -> str:
    if "error" in event:
        raise ChatError(str(event["error"]["message"]))
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _refusal(response: http.client.HTTPResponse) -> str:
    text = response.read(65_536).decode("utf-8", "replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text[:200]
    return f"the server answered with status {response.status}: {text}"
