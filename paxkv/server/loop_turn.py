"""`LoopTurn`: lets other requests run during long work on the asyncio loop."""

import asyncio
import time

_MAX_TURN_S = 0.01


class LoopTurn:
    """One request's turn on the loop. An `await` does not end it if the result is ready."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    async def end_if_long(self) -> None:
        """Lets other tasks run if the turn has taken over 10 ms. Call it between pieces of work."""
        if time.monotonic() - self._began_s > _MAX_TURN_S:
            await asyncio.sleep(0)
            self._began_s = time.monotonic()
