"""`LoopThread`: turns a callback-based `LoopTransport` into a blocking `EngineTransport`."""

import asyncio
import queue
import threading
from collections.abc import Callable

from paxkv.contracts.engine_output import EngineDead, EngineOutput
from paxkv.contracts.engine_request import EngineInput
from paxkv.contracts.engine_start import EngineReady
from paxkv.contracts.wire import LoopTransport
from paxkv.errors import InvariantError
from paxkv.fleet.engine_supervisor import SUPERVISOR_THREAD


class LoopThread:
    """An `EngineTransport` that runs a `LoopTransport` on its own event loop in a thread.

    After the final message, an `EngineDead`, `receive` returns that message again.

    Args:
        transport: Must not restart engines, because `receive` cannot report a restart.
    """

    def __init__(self, transport: LoopTransport) -> None:
        self._transport = transport
        self._messages: queue.SimpleQueue[EngineOutput | EngineReady] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        # The thread holds no reference to this object, so the object can be garbage-collected.
        self._thread = threading.Thread(
            target=_run, args=(self._loop,), name="paxkv-engine-loop", daemon=True
        )
        self._thread.start()
        # Wait until all threads run, because none can be started while the interpreter exits.
        asyncio.run_coroutine_threadsafe(
            _deliver(transport, self._loop, self._messages.put), self._loop
        ).result()

    def send(self, message: EngineInput) -> None:
        """See `EngineTransport.send`."""
        self._transport.send(message)

    def receive(self, timeout_s: float | None = None) -> EngineOutput | None:
        """See `EngineTransport.receive`."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, EngineReady):
            raise InvariantError("an engine was restarted, which LoopThread cannot report.")
        if isinstance(message, EngineDead) and message.request_ids is None:
            self._messages.put(message)
        return message

    def close(self) -> None:
        """See `EngineTransport.close`; may be repeated."""
        if self._loop.is_closed():
            return
        # The garbage collector may call this on any thread. The loop's and the supervisors' threads
        # must keep running until the engines have ended, so they cannot wait here.
        thread = threading.current_thread()
        if thread is self._thread or thread.name == SUPERVISOR_THREAD:
            threading.Thread(target=self.close, name="paxkv-engine-close").start()
            return
        self._transport.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _deliver(
    transport: LoopTransport,
    loop: asyncio.AbstractEventLoop,
    on_message: Callable[[EngineOutput | EngineReady], None],
) -> None:
    transport.deliver_on(loop, on_message)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
