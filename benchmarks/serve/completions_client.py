"""Streams completions from an OpenAI-compatible server and records when each piece arrives."""

import time
from collections.abc import AsyncIterator, Mapping

import httpx
import msgspec

from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.request_record import RequestRecord

_MAX_ERROR_CHARS = 300


class ServerError(Exception):
    """The server cannot be reached, or its answer is wrong."""


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class AnswerStream:
    """The received part of one answer."""

    def __init__(self) -> None:
        self.chunk_times: list[float] = []
        self.texts: list[str] = []
        self.usage: _Usage | None = None
        self.is_complete = False
        self._decoder = msgspec.json.Decoder(_Chunk)

    def add_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_complete = True
            return
        try:
            chunk = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ServerError(f"an event is not a chunk: {error}; got {_shorten(data)}") from error
        if chunk.error is not None:
            raise ServerError(f"error in the stream: {_shorten(msgspec.json.encode(chunk.error))}")
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.is_complete |= choice.finish_reason is not None
            if choice.text:
                self.texts.append(choice.text)
            # The last event has no token if it has no text. Other events without text may have
            # tokens that do not complete a character.
            if choice.text or choice.finish_reason is None:
                self.chunk_times.append(now)


class CompletionsClient:
    """A client of one server; an asynchronous context manager.

    Args:
        base_url: The address with the API's version, such as "http://127.0.0.1:8000/v1".
        api_key: Sent as a bearer token; None sends none.
        timeout_s: A request fails after this long without data from the server.
    """

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/"),
            headers=headers,
            timeout=timeout_s,
            # A wait for a connection would be counted as the server's delay.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> "CompletionsClient":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.__aexit__(*exc_info)

    async def first_model(self) -> str:
        """Name of the first model that the server lists.

        Raises:
            ServerError: The server cannot be reached, or lists no model.
        """
        try:
            response = await self._client.get("/models")
            response.raise_for_status()
            models = msgspec.json.decode(response.content, type=_Models).data
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            base_url = str(self._client.base_url).rstrip("/")
            raise ServerError(
                f"GET {base_url}/models: {_describe(error)}. Is this the address of a server "
                "with the API's version, such as http://127.0.0.1:8000/v1?"
            ) from error
        if not models:
            raise ServerError("the server lists no model; name one with --model.")
        return models[0].id

    async def complete(
        self,
        request: RequestInput,
        fields: Mapping[str, object],
        *,
        start: float,
        due_s: float = 0.0,
    ) -> RequestRecord:
        """Sends one request and reads its stream to the end; the record holds any failure.

        Args:
            fields: Fields of the body except the prompt and its length.
            start: `time.perf_counter()` when the load began.
            due_s: Seconds after `start` at which the request arrived.
        """
        body = {
            **fields,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = msgspec.json.encode(body)
        stream = AnswerStream()
        error: str | None = None
        sent_s = time.perf_counter() - start
        try:
            await self._read_stream(content, stream)
        except (httpx.HTTPError, ServerError) as failure:
            error = _describe(failure)
        end_s = time.perf_counter() - start
        usage = stream.usage
        is_counted = usage is not None and usage.completion_tokens is not None
        return RequestRecord(
            due_s=due_s,
            sent_s=sent_s,
            chunk_times_s=tuple(t - start for t in stream.chunk_times),
            end_s=end_s,
            num_prompt_tokens=None if usage is None else usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens if is_counted else len(stream.chunk_times),
            counted_by="usage" if is_counted else "chunks",
            num_asked_tokens=request.max_tokens,
            text="".join(stream.texts),
            error=error,
        )

    async def _read_stream(self, content: bytes, stream: AnswerStream) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._client.stream(
            "POST", "/completions", content=content, headers=headers
        ) as response:
            if response.status_code != 200:
                raise ServerError(
                    f"HTTP {response.status_code}: {_shorten(await response.aread())}"
                )
            async for data, now in _events(response):
                stream.add_event(data, now)
        if not stream.is_complete:
            raise ServerError("the stream ended before the answer did.")
        if not stream.chunk_times:
            # paxkv without a tokenizer sends no text, but it can send log-probabilities.
            raise ServerError(
                "no piece of the stream holds a token. If the server has no tokenizer, add "
                """--extra-body '{"logprobs": 0}'."""
            )


async def _events(response: httpx.Response) -> AsyncIterator[tuple[bytes, float]]:
    r"""Data of each server-sent event, and the time of its arrival.

    Lines are split at b"\n" only. `httpx.Response.aiter_lines` also splits at characters such as
    U+2028, which JSON may contain.
    """
    rest = b""
    async for received in response.aiter_bytes():
        now = time.perf_counter()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip(), now


def _describe(error: Exception) -> str:
    if isinstance(error, ServerError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shorten(data: bytes) -> str:
    text = data.decode("utf-8", errors="replace").strip()
    return text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 3] + "..."
