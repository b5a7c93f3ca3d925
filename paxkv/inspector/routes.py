"""The inspector's HTTP routes: its page, the feed, block details and trace replays."""

import asyncio
import importlib.resources
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import paxkv
from paxkv.config.server_config import ServerConfig
from paxkv.contracts.engine_start import ModelInfo
from paxkv.contracts.observation import BlockDetails
from paxkv.errors import EngineDeadError, InvalidRequestError, PaxkvError
from paxkv.inspector.access import check_access
from paxkv.inspector.feed import InspectedEngine, InspectorFeed
from paxkv.inspector.trace_upload import TraceUploads

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# Limit of concurrent requests for block details. A page sends one at a time.
MAX_DETAIL_CALLS = 4


class Tokenizer(Protocol):
    """Turns a block's tokens into text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Engine(InspectedEngine, Protocol):
    """The engine client that the routes use."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


class BlockAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`BlockDetails` with the tokens as text. `texts` is None if the tokens are not shown."""

    block_id: int
    ref_cnt: int
    state: str
    block_hash: str | None
    group_id: int | None
    num_hits: int
    first_token_idx: int | None
    token_ids: list[int] | None
    texts: list[str] | None


# Paths that return data about requests and blocks. The page itself contains none.
INSPECTED_PATHS = ("/inspector/events", "/inspector/blocks", "/inspector/trace")


class InspectorRoutes:
    """The inspector's routes. Each checks access first with `check_access`."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._feed = InspectorFeed(engine, keeps_tokens=config.inspector_show_text)
        self._uploads = TraceUploads(config.inspector_max_trace_bytes)
        self._files = _read_page()
        self._detail_calls = asyncio.Semaphore(MAX_DETAIL_CALLS)

    def routes(self) -> list[Route]:
        return [
            Route("/inspector", self._checked(self.page)),
            Route("/inspector/page/{name}", self._checked(self.file)),
            Route("/inspector/events", self._checked(self.events)),
            Route("/inspector/blocks/{block_id}", self._checked(self.block)),
            Route("/inspector/trace", self._checked(self.trace), methods=["POST"]),
        ]

    def close(self) -> None:
        """Ends the event streams, when the server starts to drain."""
        self._feed.close()

    async def page(self, _request: Request) -> Response:
        return self._file_response("index.html")

    async def file(self, request: Request) -> Response:
        return self._file_response(request.path_params["name"])

    async def events(self, _request: Request) -> Response:
        """Streams the feed: `hello`, then a `snapshot`, then `delta`s."""
        events = self._feed.events()
        hello = {
            "version": paxkv.__version__,
            "model": self._engine.model_info.served_model_name,
            "shows_text": self._config.inspector_show_text,
            "max_trace_bytes": self._config.inspector_max_trace_bytes,
        }
        first = b"event: hello\ndata: " + msgspec.json.encode(hello) + b"\n\n"
        # Get the first event before the response starts, so that TooManyPagesError sets the status.
        second = await anext(events)

        async def stream() -> AsyncGenerator[bytes, None]:
            async with aclosing(events):
                yield first
                yield second
                async for event in events:
                    yield event

        headers = HEADERS | {"X-Accel-Buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    async def block(self, request: Request) -> Response:
        """Describes a block; includes its tokens only with `--inspector-show-text`."""
        holder = request.query_params.get("holder", "0")
        if not (holder.isascii() and holder.isdecimal() and len(holder) < 16):
            raise InvalidRequestError(
                f"{holder=} must be the key of a request, or 0.", param="holder"
            )
        async with self._detail_calls:
            details = await self._fetch_block(_block_id(request), int(holder))
        texts = None
        if details.token_ids is not None and self._engine.tokenizer is not None:
            texts = [
                self._engine.tokenizer.decode([token_id], skip_special_tokens=False)
                for token_id in details.token_ids
            ]
        answer = BlockAnswer(
            block_id=details.block_id,
            ref_cnt=details.ref_cnt,
            state=details.state,
            block_hash=details.block_hash,
            group_id=details.group_id,
            num_hits=details.num_hits,
            first_token_idx=details.first_token_idx,
            token_ids=details.token_ids,
            texts=texts,
        )
        return Response(msgspec.json.encode(answer), media_type="application/json", headers=HEADERS)

    async def _fetch_block(self, block_id: int, holder_key: int) -> BlockDetails:
        try:
            return await self._engine.inspect_block(
                block_id, holder_key, with_tokens=self._config.inspector_show_text
            )
        except (InvalidRequestError, EngineDeadError):
            raise
        except PaxkvError as error:
            # The engine rejected the call, for example because there is no such block.
            raise InvalidRequestError(str(error), param="block_id") from error

    async def trace(self, request: Request) -> Response:
        """Replays the trace in the body; returns its frames as JSON lines, and a final summary."""
        lines = await self._uploads.start(request.stream())
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=HEADERS)

    def _checked(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def check_and_handle(request: Request) -> Response:
            check_access(request, self._config)
            return await handler(request)

        return check_and_handle

    def _file_response(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise PageFileError(f"the inspector has no file {name!r}. Open /inspector.")
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(content, media_type=media_type, headers=HEADERS)


class PageFileError(InvalidRequestError):
    """The inspector has no such file or block."""

    http_status = 404


def _block_id(request: Request) -> int:
    text = request.path_params["block_id"]
    if not (text.isascii() and text.isdecimal()):
        raise PageFileError(f"the inspector has no block {text[:40]!r}; block ids are integers.")
    # Longer ids exceed every pool, and `int` may reject very long ones.
    return int(text) if len(text) < 16 else 2**53


def _read_page() -> dict[str, bytes]:
    """Reads the page's files by name, so that clients never supply a path."""
    folder = importlib.resources.files("paxkv.inspector") / "page"
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in MEDIA_TYPES
    }
