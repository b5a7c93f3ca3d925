"""`EngineCalls`: calls methods of the engine and waits for their replies."""

import asyncio
from collections.abc import Callable

from paxkv.contracts.engine_output import UtilityReply
from paxkv.contracts.engine_request import UtilityCall
from paxkv.contracts.wire import LoopTransport
from paxkv.errors import PaxkvError


class EngineCalls:
    """The calls of one client to its engine. Use it on the client's loop."""

    def __init__(self, transport: LoopTransport) -> None:
        self._transport = transport
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._num_calls = 0

    async def call(self, method: str, *arguments: str | int | bool) -> str:
        """Calls a method of the engine and returns the JSON of its result.

        Raises:
            PaxkvError: The engine answered with an error, or `fail_all` was called.
        """
        call_id, self._num_calls = self._num_calls, self._num_calls + 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._transport.send(UtilityCall(call_id=call_id, method=method, arguments=arguments))
            return await future
        finally:
            del self._waiting[call_id]

    def on_reply(self, reply: UtilityReply) -> None:
        """Ends the call that a reply belongs to."""
        future = self._waiting.get(reply.call_id)
        # None or done if the caller was cancelled.
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(PaxkvError(f"the engine answered: {reply.error}"))
        else:
            future.set_result(reply.result_json)

    def fail_all(self, make_error: Callable[[], PaxkvError]) -> None:
        """Ends all calls, each with a new error."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(make_error())
