"""`CoreThread`: runs an engine core in a thread, behind the messages it would get as a process."""

import logging
import queue
import threading
from collections.abc import Iterator

from paxkv.contracts import wire
from paxkv.contracts.engine_output import EngineDead, EngineOutput
from paxkv.contracts.engine_request import EngineInput, Shutdown
from paxkv.engine.engine_core import EngineCore
from paxkv.errors import EngineDeadError

logger = logging.getLogger(__name__)

# A step that takes longer than this at the end is left to die with the process.
CLOSE_TIMEOUT_S = 60.0


class CoreThread:
    """The `EngineTransport` of an engine core in this process.

    Only bytes pass between the threads, so that nothing can lean on shared objects. The last
    message is always an `EngineDead`; `receive` repeats it.

    Args:
        core: Belongs to the thread from here on.
    """

    def __init__(self, core: EngineCore) -> None:
        self._inputs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_dead = threading.Event()
        self._thread = threading.Thread(
            target=_run_core,
            args=(core, self._inputs, self._outputs, self._is_dead),
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
        """Next message from the engine; None when `timeout_s` passed without one."""
        try:
            data = self._outputs.get(timeout=timeout_s)
        except queue.Empty:
            return None
        message = wire.decode_output(data)
        if isinstance(message, EngineDead):
            self._outputs.put(data)
        return message

    def close(self) -> None:
        """Ends the engine after the step that it computes now, and waits for it."""
        if not self._is_dead.is_set():
            self._inputs.put(wire.encode(Shutdown()))
        # The garbage collector may call this from any thread.
        if threading.current_thread() is self._thread:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the engine's last step takes over %g s; not waiting.", CLOSE_TIMEOUT_S)


def _run_core(
    core: EngineCore,
    inputs: queue.SimpleQueue[bytes],
    outputs: queue.SimpleQueue[bytes],
    is_dead: threading.Event,
) -> None:
    """The thread's body. It holds no reference to `CoreThread`, which may go before it."""
    reason = "it was stopped"
    try:
        _run_until_shutdown(core, inputs, outputs)
        reason = "it was shut down"
    except Exception as error:
        logger.exception("the engine died")
        reason = f"{type(error).__name__}: {error}"
    finally:
        is_dead.set()
        outputs.put(wire.encode(EngineDead(reason=reason)))
        core.close()


def _run_until_shutdown(
    core: EngineCore, inputs: queue.SimpleQueue[bytes], outputs: queue.SimpleQueue[bytes]
) -> None:
    while not core.is_finished:
        for data in _waiting_messages(inputs, is_blocking=not core.has_work):
            reply = core.handle(wire.decode_input(data))
            if reply is not None:
                outputs.put(wire.encode(reply))
        if core.has_work and not core.is_finished:
            outputs.put(wire.encode(core.step()))


def _waiting_messages(inputs: queue.SimpleQueue[bytes], *, is_blocking: bool) -> Iterator[bytes]:
    """All messages that wait now; with `is_blocking` waits for the first."""
    if is_blocking:
        yield inputs.get()
    while True:
        try:
            yield inputs.get_nowait()
        except queue.Empty:
            return
