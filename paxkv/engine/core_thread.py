"""`CoreThread`: runs an engine core in a thread, with the same messages as in a process."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from paxkv.contracts import wire
from paxkv.contracts.engine_output import EngineDead, EngineOutput
from paxkv.contracts.engine_request import EngineInput, Shutdown
from paxkv.engine.core_loop import run_core
from paxkv.engine.engine_core import EngineCore
from paxkv.errors import EngineDeadError

logger = logging.getLogger(__name__)

# `close` waits this long for the last step. A longer step runs on until the process ends.
CLOSE_TIMEOUT_S = 60.0


class CoreThread:
    """The `EngineTransport` of an engine core in this process.

    The threads exchange only bytes, so they share no objects. The last message is always an
    `EngineDead`, and `receive` repeats it.

    Args:
        core: Only the thread may use it from now on.
    """

    def __init__(self, core: EngineCore) -> None:
        self._inputs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_dead = threading.Event()
        self._is_given_up = threading.Event()
        self._on_message: Callable[[EngineOutput], None] | None = None
        self._thread = threading.Thread(
            target=_run_in_thread,
            args=(core, _QueueChannel(self._inputs, self._outputs), self._is_dead),
            name="paxkv-engine-core",
            daemon=True,
        )
        self._thread.start()

    def send(self, message: EngineInput) -> None:
        """Queues a message.

        Raises:
            EngineDeadError: The engine has ended.
        """
        if self._is_dead.is_set():
            raise EngineDeadError("the engine has ended; build a new one.")
        self._inputs.put(wire.encode(message))

    def receive(self, timeout_s: float | None = None) -> EngineOutput | None:
        """Returns the next message from the engine; None if none arrives within `timeout_s`."""
        try:
            data = self._outputs.get(timeout=timeout_s)
        except queue.Empty:
            return None
        message = wire.decode_output(data)
        if isinstance(message, EngineDead):
            self._outputs.put(data)
        return message

    def deliver_on(
        self, loop: asyncio.AbstractEventLoop, on_message: Callable[[EngineOutput], None]
    ) -> None:
        """Calls `on_message` on the loop with each message from now on."""
        self._on_message = on_message
        threading.Thread(
            target=self._deliver, args=(loop, on_message), name="paxkv-receiver", daemon=True
        ).start()

    def _deliver(
        self, loop: asyncio.AbstractEventLoop, on_message: Callable[[EngineOutput], None]
    ) -> None:
        """Runs in the receiver thread until the engine's last message."""
        message: EngineOutput | None = None
        while not isinstance(message, EngineDead):
            try:
                message = self.receive()
            # After any error no message follows, and callers would wait forever.
            except Exception as error:
                logger.exception("the engine's messages cannot be read")
                message = EngineDead(reason=f"{type(error).__name__}: {error}")
            if self._is_given_up.is_set():
                return
            try:
                loop.call_soon_threadsafe(on_message, message)
            except RuntimeError:
                # The loop was closed without a call of `close`, so no messages are needed.
                return

    def give_up(self, reason: str) -> None:
        """See `LoopTransport.give_up`. No other engine replaces this one."""
        if not self._is_given_up.is_set():
            self._is_given_up.set()
            self._inputs.put(wire.encode(Shutdown()))
            self._on_message(EngineDead(reason=reason))

    def close(self) -> None:
        """Ends the engine after the running step, and waits for the end."""
        if not self._is_dead.is_set():
            self._inputs.put(wire.encode(Shutdown()))
        # The garbage collector may call this from any thread.
        if threading.current_thread() is self._thread:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the engine's last step is still running after %g s.", CLOSE_TIMEOUT_S)


class _QueueChannel:
    """The core's `CoreChannel`."""

    def __init__(self, inputs: queue.SimpleQueue[bytes], outputs: queue.SimpleQueue[bytes]) -> None:
        self._inputs = inputs
        self.send = outputs.put

    def waiting_messages(self, wait_s: float | None) -> Iterator[bytes]:
        if wait_s is None:
            yield self._inputs.get()
        end_s = time.perf_counter() + (wait_s or 0.0)
        while True:
            try:
                yield self._inputs.get(timeout=max(0.0, end_s - time.perf_counter()))
            except queue.Empty:
                return

    def count_step(self) -> None:
        """Does nothing. A client could not end a thread that hangs."""


def _run_in_thread(core: EngineCore, channel: _QueueChannel, is_dead: threading.Event) -> None:
    """Runs in the thread. Has no reference to `CoreThread`, which may be deleted earlier."""
    last_message = EngineDead(reason="it was stopped")
    try:
        last_message = run_core(core, channel)
    finally:
        is_dead.set()
        channel.send(wire.encode(last_message))
        core.close()
