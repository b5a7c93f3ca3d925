"""`OutputStream`: a queue of the outputs of one caller's request."""

import asyncio

from paxkv.client.waiting_budget import WaitingBudget
from paxkv.client.waiting_output import WaitingOutput
from paxkv.contracts.request_output import RequestOutput
from paxkv.errors import PaxkvError

# Limit of the packed bytes that wait for one reader, far above the text of 128 long completions.
MAX_WAITING_BYTES = 32 * 2**20
# Deltas are merged up to this packed size. Unpacked, a piece takes several times as much memory.
_MAX_PIECE_BYTES = 128 * 2**10


class OutputStream:
    """A queue of the outputs of one caller's request; the reader awaits `next_output`.

    Args:
        engine_request_id: Id of the request in the engine. If the request becomes several engine
            requests, their ids end with this id.
        budget: Shared by all streams of the client.
    """

    def __init__(
        self, request_id: str, *, engine_request_id: str, budget: WaitingBudget | None = None
    ) -> None:
        self.request_id = request_id
        self.engine_request_id = engine_request_id
        # Ids of this stream's unfinished requests in the output processor.
        self.unfinished_ids: list[str] = []
        self.is_aborted = False
        self._queue: asyncio.Queue[WaitingOutput | PaxkvError] = asyncio.Queue()
        # The newest output in the queue, to which deltas can be added; None if there is none.
        self._last_piece: WaitingOutput | None = None
        self._budget = WaitingBudget() if budget is None else budget
        # Only packed outputs count. An output is packed when the next one arrives before it is
        # read, so this stays 0 for a reader that keeps up.
        self.num_waiting_bytes = 0
        self._error: PaxkvError | None = None

    @property
    def is_over_limit(self) -> bool:
        """True if too many bytes wait. A single waiting output may have any size."""
        return self._queue.qsize() > 1 and self.num_waiting_bytes > MAX_WAITING_BYTES

    def put(self, output: RequestOutput) -> None:
        """Adds an output. Merges it with a delta of the same request that still waits."""
        last = self._last_piece
        if last is not None and last.request_id == output.request_id:
            num_bytes = last.num_bytes
            last.pack()
            has_room = last.num_bytes < _MAX_PIECE_BYTES
            if has_room:
                last.add(output)
            self._add_waiting_bytes(last.num_bytes - num_bytes)
            if has_room:
                return
        self._last_piece = WaitingOutput(output)
        self._queue.put_nowait(self._last_piece)

    def fail(self, error: PaxkvError) -> None:
        """Ends the stream with an error; the reader gets the waiting outputs first."""
        self._last_piece = None
        self._queue.put_nowait(error)

    def drop(self, error: PaxkvError) -> None:
        """Ends the stream with an error and discards the waiting outputs."""
        self.free()
        self.fail(error)

    def free(self) -> None:
        """Discards the waiting outputs."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._last_piece = None
        self._add_waiting_bytes(-self.num_waiting_bytes)

    async def next_output(self) -> RequestOutput:
        """Waits for the next output; deltas that waited together are merged.

        Raises:
            EngineDeadError: The engine ended.
            InvariantError: Building the outputs failed.
            SlowReaderError: Too many bytes waited for the reader.
        """
        if self._error is not None:
            raise self._error
        if not self._queue.empty():
            # `get` would return at once. Yield, so that a reader with many waiting pieces does not
            # block the loop until all are unpacked.
            await asyncio.sleep(0)
        piece = await self._queue.get()
        if isinstance(piece, PaxkvError):
            self._error = piece
            raise piece
        if piece is self._last_piece:
            self._last_piece = None
        self._add_waiting_bytes(-piece.num_bytes)
        return piece.output()

    def _add_waiting_bytes(self, num_bytes: int) -> None:
        self.num_waiting_bytes += num_bytes
        self._budget.num_bytes += num_bytes
