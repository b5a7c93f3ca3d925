"""`InspectorFeed`: polls the engine for frames and sends them to all open pages."""

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from paxkv.contracts.observation import BlockDetails
from paxkv.errors import EngineDeadError, InvalidRequestError, PaxkvError

logger = logging.getLogger(__name__)

# Time between two polls. It is longer if answers take more than MAX_SHARE of the engine's time.
PERIOD_S = 0.1
MAX_SHARE = 0.0025
# Snapshots are expensive, so pages that open within this time share one.
SNAPSHOT_PERIOD_S = 1.0
# Must be shorter than the recorder's lease; otherwise the recording would end between two polls.
MAX_PAUSE_S = 1.0
# The engine answers between two steps, and a step may be long.
ANSWER_TIMEOUT_S = 30.0
RETRY_S = 1.0
MAX_PAGES = 16
# Events that wait for one page. A slower page skips events and gets a snapshot instead.
MAX_BACKLOG = 20


class InspectedEngine(Protocol):
    """The methods of an engine client that the inspector calls."""

    async def inspect(self, after_seq: int, wants_snapshot: bool, *, keeps_tokens: bool) -> str:
        """Returns the JSON of an `Inspection` with the changes since the one numbered `after_seq`.

        Args:
            keeps_tokens: Store the tokens of cached blocks, so that `inspect_block` returns them
                after the request that computed them has ended.
        """
        ...

    async def inspect_block(
        self, block_id: int, holder_key: int, *, with_tokens: bool
    ) -> BlockDetails:
        """Describes the current state of a block."""
        ...


class TooManyPagesError(InvalidRequestError):
    """`MAX_PAGES` pages are open already."""

    http_status = 503


class _Answer(msgspec.Struct):
    """An `Inspection` with undecoded frames, which are forwarded unchanged."""

    seq: int
    took_s: float
    snapshot: msgspec.Raw = msgspec.Raw(b"null")
    delta: msgspec.Raw = msgspec.Raw(b"null")


_NO_FRAME = b"null"
_ANSWER_DECODER = msgspec.json.Decoder(_Answer)


@dataclasses.dataclass(slots=True, eq=False)
class _Page:
    events: deque[bytes] = dataclasses.field(default_factory=deque)
    has_events: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    needs_snapshot: bool = True

    def put(self, event: bytes) -> None:
        self.events.append(event)
        self.has_events.set()

    def put_frames(self, answer: _Answer) -> None:
        snapshot, delta = bytes(answer.snapshot), bytes(answer.delta)
        if self.needs_snapshot or delta == _NO_FRAME:
            if snapshot == _NO_FRAME:
                return
            self.events.clear()
            self.needs_snapshot = False
            self.put(_event("snapshot", snapshot))
        elif len(self.events) >= MAX_BACKLOG:
            self.events.clear()
            self.needs_snapshot = True
        else:
            self.put(_event("delta", delta))


class InspectorFeed:
    """Polls the engine while pages are open, and sends all pages the same bytes.

    Call every method on one loop.

    Args:
        keeps_tokens: See `InspectedEngine.inspect`.
    """

    def __init__(self, engine: InspectedEngine, *, keeps_tokens: bool = False) -> None:
        self._engine = engine
        self._keeps_tokens = keeps_tokens
        self._pages: set[_Page] = set()
        self._poll_task: asyncio.Task[None] | None = None
        self._seq = -1
        self._last_snapshot_s = float("-inf")
        self._is_closed = False

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the server-sent events of one page: a snapshot, then deltas, until `close`.

        Raises:
            TooManyPagesError: Too many pages are open; raised before the first event.
            EngineDeadError: `close` was called before; raised before the first event.
        """
        if self._is_closed:
            raise EngineDeadError("the server is shutting down.")
        if len(self._pages) >= MAX_PAGES:
            raise TooManyPagesError(
                f"{MAX_PAGES} inspector pages are open, which is the maximum. Close one."
            )
        page = _Page()
        self._pages.add(page)
        if self._poll_task is None or self._poll_task.done():
            self._poll_task = asyncio.ensure_future(self._poll())
        try:
            while not self._is_closed or page.events:
                await page.has_events.wait()
                while page.events:
                    yield page.events.popleft()
                if not self._is_closed:
                    page.has_events.clear()
        finally:
            self._pages.discard(page)
            if not self._pages and self._poll_task is not None:
                self._poll_task.cancel()
                self._poll_task = None

    def close(self) -> None:
        """Ends every stream, so that a draining server does not wait for pages."""
        self._is_closed = True
        for page in self._pages:
            page.put(_event("closed", b"{}"))

    async def _poll(self) -> None:
        while not self._is_closed:
            start_s = time.monotonic()
            pause_s = PERIOD_S
            try:
                took_s = await self._poll_once(start_s)
                pause_s = min(max(PERIOD_S, took_s / MAX_SHARE), MAX_PAUSE_S)
                pause_s -= time.monotonic() - start_s
            except (EngineDeadError, TimeoutError) as error:
                self._send_trouble(str(error) or "the engine does not answer.")
                pause_s = RETRY_S
            except PaxkvError as error:
                logger.warning("the inspector cannot read the engine's state: %s", error)
                self._send_trouble(str(error))
                pause_s = RETRY_S
            await asyncio.sleep(max(pause_s, 0.0))

    async def _poll_once(self, now_s: float) -> float:
        """Sends one answer to all pages; returns the seconds of engine time that it cost.

        Returns 0 if the answer has a snapshot, because `SNAPSHOT_PERIOD_S` limits that cost.
        """
        wants_snapshot = (
            any(page.needs_snapshot for page in self._pages)
            and now_s - self._last_snapshot_s >= SNAPSHOT_PERIOD_S
        )
        reply = await asyncio.wait_for(
            self._engine.inspect(self._seq, wants_snapshot, keeps_tokens=self._keeps_tokens),
            ANSWER_TIMEOUT_S,
        )
        answer = _ANSWER_DECODER.decode(reply)
        self._seq = answer.seq
        if bytes(answer.snapshot) != _NO_FRAME:
            self._last_snapshot_s = now_s
        for page in self._pages:
            page.put_frames(answer)
        return answer.took_s if bytes(answer.snapshot) == _NO_FRAME else 0.0

    def _send_trouble(self, message: str) -> None:
        for page in self._pages:
            page.events.clear()
            page.needs_snapshot = True
            page.put(_event("trouble", msgspec.json.encode({"message": message})))


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
