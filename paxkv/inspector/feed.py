"""InspectorFeed: one who asks the engine for frames, and the pages that look at them."""

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

# The engine is asked at most so often, and less often where answers take more than this share of
# its time.
PERIOD_S = 0.1
MAX_SHARE = 0.0025
# Snapshots cost the most: pages that open at once share one.
SNAPSHOT_PERIOD_S = 1.0
# Shorter than the recorder's lease, or every question would find one that has ended.
MAX_PAUSE_S = 1.0
# The engine answers between two steps, and a step may be long.
ANSWER_TIMEOUT_S = 30.0
RETRY_S = 1.0
MAX_PAGES = 16
# What a page has not taken yet; one that is slower gets a snapshot instead of what it missed.
MAX_BACKLOG = 20


class InspectedEngine(Protocol):
    """What the inspector needs of an engine."""

    async def inspect(self, after_seq: int, wants_snapshot: bool, *, keeps_tokens: bool) -> str:
        """JSON of an `Inspection`: what changed since the call that answered `after_seq`.

        Args:
            keeps_tokens: So that `inspect_block` knows them also of blocks that nobody holds.
        """
        ...

    async def inspect_block(
        self, block_id: int, holder_key: int, *, with_tokens: bool
    ) -> BlockDetails:
        """One block as it is now."""
        ...


class TooManyPagesError(InvalidRequestError):
    """As many pages look as may."""

    http_status = 503


class _Answer(msgspec.Struct):
    """An `Inspection` whose frames go on as they came."""

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
    """Asks while there are pages, and sends each of them the same bytes.

    Every method is called on one loop.

    Args:
        keeps_tokens: See `InspectedEngine.inspect`.
    """

    def __init__(self, engine: InspectedEngine, *, keeps_tokens: bool = False) -> None:
        self._engine = engine
        self._keeps_tokens = keeps_tokens
        self._pages: set[_Page] = set()
        self._asker: asyncio.Task[None] | None = None
        self._seq = -1
        self._last_snapshot_s = float("-inf")
        self._is_closed = False

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events of one page: a snapshot, then deltas, until `close`.

        Raises:
            TooManyPagesError: Before the first event.
            EngineDeadError: After `close`, before the first event.
        """
        if self._is_closed:
            raise EngineDeadError("the server is shutting down.")
        if len(self._pages) >= MAX_PAGES:
            raise TooManyPagesError(
                f"{MAX_PAGES} inspector pages are open, and no more may be. Close one."
            )
        page = _Page()
        self._pages.add(page)
        if self._asker is None or self._asker.done():
            self._asker = asyncio.ensure_future(self._ask())
        try:
            while not self._is_closed or page.events:
                await page.has_events.wait()
                while page.events:
                    yield page.events.popleft()
                if not self._is_closed:
                    page.has_events.clear()
        finally:
            self._pages.discard(page)
            if not self._pages and self._asker is not None:
                self._asker.cancel()
                self._asker = None

    def close(self) -> None:
        """Ends every stream: a server that drains must not wait for pages."""
        self._is_closed = True
        for page in self._pages:
            page.put(_event("closed", b"{}"))

    async def _ask(self) -> None:
        while not self._is_closed:
            start_s = time.monotonic()
            pause_s = PERIOD_S
            try:
                took_s = await self._ask_once(start_s)
                pause_s = min(max(PERIOD_S, took_s / MAX_SHARE), MAX_PAUSE_S)
                pause_s -= time.monotonic() - start_s
            except (EngineDeadError, TimeoutError) as error:
                self._tell_trouble(str(error) or "the engine does not answer.")
                pause_s = RETRY_S
            except PaxkvError as error:
                logger.warning("the inspector cannot look into the engine: %s", error)
                self._tell_trouble(str(error))
                pause_s = RETRY_S
            await asyncio.sleep(max(pause_s, 0.0))

    async def _ask_once(self, now_s: float) -> float:
        """Passes one answer on; seconds of the engine that such a one costs."""
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
        # A snapshot is an exception, with a limit of its own.
        return answer.took_s if bytes(answer.snapshot) == _NO_FRAME else 0.0

    def _tell_trouble(self, message: str) -> None:
        for page in self._pages:
            page.events.clear()
            page.needs_snapshot = True
            page.put(_event("trouble", msgspec.json.encode({"message": message})))


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
