"""`OutputStream`: where the outputs of one caller's request wait for their reader."""

import asyncio

from paxkv.client.waiting_budget import WaitingBudget
from paxkv.client.waiting_output import WaitingOutput
from paxkv.contracts.request_output import RequestOutput
from paxkv.errors import PaxkvError

# What may wait for one reader. The text of 128 completions of a thousand tokens fits many times.
MAX_WAITING_BYTES = 32 * 2**20
# What a reader gets in one piece. Unpacked it takes several times as much.
_MAX_PIECE_BYTES = 128 * 2**10


class OutputStream:
    """Where the outputs of one caller's request go.

    Args:
        engine_request_id: Its id in the engine, and the end of its requests' ids there.
        budget: Of all streams of the client.
    """

    def __init__(
        self, request_id: str, *, engine_request_id: str, budget: WaitingBudget | None = None
    ) -> None:
        self.request_id = request_id
        self.engine_request_id = engine_request_id
        # What the output processor follows for it.
        self.unfinished_ids: list[str] = []
        self.is_aborted = False
        self._queue: asyncio.Queue[WaitingOutput | PaxkvError] = asyncio.Queue()
        # The last one in the queue, until it is taken.
        self._last_piece: WaitingOutput | None = None
        self._budget = WaitingBudget() if budget is None else budget
        # Packed bytes: the output that came last is not packed, and a reader that keeps up takes
        # every output unpacked.
        self.num_waiting_bytes = 0
        self._error: PaxkvError | None = None

    @property
    def is_over_limit(self) -> bool:
        """Whether more waits than may in one stream. One output may be as large as it is."""
        return self._queue.qsize() > 1 and self.num_waiting_bytes > MAX_WAITING_BYTES

    def put(self, output: RequestOutput) -> None:
        """Adds an output. Deltas of one request that wait together become one."""
        last = self._last_piece
        if last is not None and last.request_id == output.request_id:
            num_bytes = last.num_bytes
            last.pack()
            has_room = last.num_bytes < _MAX_PIECE_BYTES
            if has_room:
                last.add(output)
            self._count(last.num_bytes - num_bytes)
            if has_room:
                return
        self._last_piece = WaitingOutput(output)
        self._queue.put_nowait(self._last_piece)

    def fail(self, error: PaxkvError) -> None:
        """Ends the stream with an error, after the outputs that wait."""
        self._last_piece = None
        self._queue.put_nowait(error)

    def drop(self, error: PaxkvError) -> None:
        """Ends the stream with an error, and frees the outputs that wait."""
        self.free()
        self.fail(error)

    def free(self) -> None:
        """Frees the outputs that wait."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._last_piece = None
        self._count(-self.num_waiting_bytes)

    async def take(self) -> RequestOutput:
        """The next output; deltas that waited together are merged.

        Raises:
            EngineDeadError: The engine ended instead.
            InvariantError: Its outputs cannot be made.
            SlowReaderError: Too much waited.
        """
        if self._error is not None:
            raise self._error
        if not self._queue.empty():
            # `get` would not wait. A reader that catches up, or whose client is gone, must not keep
            # the loop until all pieces are unpacked.
            await asyncio.sleep(0)
        piece = await self._queue.get()
        if isinstance(piece, PaxkvError):
            self._error = piece
            raise piece
        if piece is self._last_piece:
            self._last_piece = None
        self._count(-piece.num_bytes)
        return piece.output()

    def _count(self, num_bytes: int) -> None:
        self.num_waiting_bytes += num_bytes
        self._budget.num_bytes += num_bytes
