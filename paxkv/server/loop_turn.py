"""`LoopTurn`: long work on the asyncio loop lets other requests run in between."""

import asyncio
import time

_MAX_TURN_S = 0.01


class LoopTurn:
    """One request's turn on the loop. An `await` alone does not end it: the result may be there."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    async def end_if_long(self) -> None:
        """Gives the loop back if the turn has taken over 10 ms. Call it between pieces of work."""
        if time.monotonic() - self._began_s > _MAX_TURN_S:
            await asyncio.sleep(0)
            self._began_s = time.monotonic()
