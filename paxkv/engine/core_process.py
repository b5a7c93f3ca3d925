"""Runs an engine core in its own process, with ZeroMQ sockets for its client's messages.

The client's process starts this process, and writes an order with the settings as one line to its
standard input. The client keeps this pipe open. When the client's process ends, for any reason, the
pipe closes and this process ends too. Only the client handles signals of the terminal.
"""

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import zmq

from paxkv.config.engine_config import EngineConfig
from paxkv.contracts import wire
from paxkv.contracts.engine_output import EngineDead, EngineOutput
from paxkv.contracts.engine_start import (
    EngineHello,
    EngineOrder,
    EngineReady,
    EngineStartFailed,
    EngineStartOutput,
    FollowerReady,
    ModelFound,
)
from paxkv.contracts.rank_place import RankPlace
from paxkv.contracts.step_counter import StepCounter
from paxkv.engine.core_loop import run_core
from paxkv.engine.engine_core import EngineCore
from paxkv.errors import ConfigError

logger = logging.getLogger(__name__)

# A starting engine reports progress this often, if it used the processor for more than `_MIN_WORK`
# of the time. An engine that compiles or reads from a slow disk uses more; a hanging one does not.
_PULSE_S = 1.0
_MIN_WORK = 0.01
# Time for the last messages to reach a busy client.
_LINGER_MS = 5000
_PARENT_IS_GONE = 1


class BuildCore(Protocol):
    """Builds the engine of the process.

    Raises:
        ConfigError: The settings are wrong. The message explains the error to the user.
    """

    def __call__(
        self,
        config: EngineConfig,
        *,
        show_progress: bool,
        on_model_found: Callable[[Path], None],
        place: RankPlace | None = None,
    ) -> tuple[EngineCore, EngineReady]: ...


class BuildFollower(Protocol):
    """Builds a process that repeats the calls of the leader of its group.

    Returns:
        The function that does so until the leader ends.

    Raises:
        ConfigError: As for `BuildCore`.
    """

    def __call__(self, config: EngineConfig, *, place: RankPlace) -> Callable[[], None]: ...


class ZmqChannel:
    """The engine's `CoreChannel`: one socket for input, one for output. Neither drops messages."""

    def __init__(self, order: EngineOrder) -> None:
        self._counter = StepCounter(order.step_counter)
        self.count_step = self._counter.count_step
        self._context = zmq.Context()
        self._inputs = self._socket(zmq.PULL)
        self._outputs = self._socket(zmq.PUSH)
        if order.curve_keys is not None:
            keys = order.curve_keys
            self._inputs.curve_server = True
            self._inputs.curve_secretkey = keys.input_secret.encode()
            self._outputs.curve_publickey, self._outputs.curve_secretkey = zmq.curve_keypair()
            self._outputs.curve_serverkey = keys.output_public.encode()
        self._inputs.bind(order.input_endpoint)
        self._outputs.connect(order.output_endpoint)
        self.post(EngineHello(input_endpoint=self._inputs.getsockopt_string(zmq.LAST_ENDPOINT)))

    def post(self, message: EngineOutput | EngineStartOutput) -> None:
        """Encodes and queues a message. Never waits."""
        self.send(wire.encode(message))

    def send(self, data: bytes) -> None:
        """Queues a message. Never waits, because the queue has no limit."""
        self._outputs.send(data)

    def waiting_messages(self, wait_s: float | None) -> Iterator[bytes]:
        """See `CoreChannel.waiting_messages`."""
        if wait_s is None:
            self._counter.count_sleep()
            data = self._inputs.recv()
            self._counter.count_wake()
            yield data
        end_s = time.perf_counter() + (wait_s or 0.0)
        while True:
            left_s = end_s - time.perf_counter()
            if left_s > 0 and not self._inputs.poll(1000 * left_s):
                return
            try:
                yield self._inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def close(self) -> None:
        """Waits until the client has received all messages, for `_LINGER_MS` at most."""
        self._context.destroy(linger=_LINGER_MS)

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # no limit: a full queue would make a step wait, or lose a token
        return socket


def run_engine_process(build: BuildCore, build_follower: BuildFollower | None = None) -> int:
    """Reads an order from standard input, and runs its engine; returns the process's exit code.

    Args:
        build_follower: Needed if the order may be for a follower.
    """
    order = _read_order()
    if order is None:
        return _PARENT_IS_GONE
    # Prints the stacks of a hanging step. The client sends the signal before it ends the process.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    is_binding = threading.Lock()
    threading.Thread(
        target=_end_with_parent,
        args=(order.folder, is_binding),
        name="paxkv-parent-watch",
        daemon=True,
    ).start()
    with is_binding:
        channel = ZmqChannel(order)
    try:
        if order.place is not None and order.place.rank > 0:
            return _follow(build_follower, order, channel)
        return _build_and_run(build, order, channel)
    finally:
        channel.close()


def leave_signals_to_parent() -> None:
    """Makes this process ignore SIGINT and SIGTERM, so that its parent can drain requests first.

    Ctrl-C reaches every process of a terminal, and systemd's SIGTERM every process of a service.
    The parent started this process with both signals blocked.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _read_order() -> EngineOrder | None:
    # `_end_with_parent` reads the descriptor instead of this buffer. The buffer is empty after the
    # line, because the client writes nothing else.
    line = sys.stdin.buffer.readline()
    return msgspec.json.decode(line, type=EngineOrder) if line.endswith(b"\n") else None


def _end_with_parent(folder: str | None, is_binding: threading.Lock) -> None:
    """Runs in a thread, and ends the process when standard input closes."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    # Waits until the channel has bound its socket. Otherwise, the socket could leave a file behind.
    is_binding.acquire()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    # Does not wait for the running step: no client reads its output.
    os._exit(_PARENT_IS_GONE)


@contextlib.contextmanager
def _start_pulse(count_step: Callable[[], None]) -> Iterator[None]:
    """Calls `count_step` every `_PULSE_S` from a thread, while the process uses the processor.

    If another thread hangs and holds the interpreter's lock, the calls stop, as they should.
    """
    is_over = threading.Event()
    # The first progress: the process has loaded its libraries.
    count_step()

    def run() -> None:
        worked_s = time.process_time()
        while not is_over.wait(_PULSE_S):
            if time.process_time() - worked_s > _MIN_WORK * _PULSE_S:
                count_step()
            worked_s = time.process_time()

    thread = threading.Thread(target=run, name="paxkv-start-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _build_and_run(build: BuildCore, order: EngineOrder, channel: ZmqChannel) -> int:
    def build_engine() -> tuple[EngineCore, EngineReady]:
        return build(
            order.config,
            show_progress=order.show_progress,
            on_model_found=lambda folder: channel.post(ModelFound(folder=str(folder))),
            place=order.place,
        )

    built = _try_to_build(build_engine, channel)
    if built is None:
        return 1
    core, ready = built
    channel.post(ready)
    try:
        channel.post(run_core(core, channel))
    finally:
        core.close()
    return 0


def _follow(build: BuildFollower, order: EngineOrder, channel: ZmqChannel) -> int:
    follow = _try_to_build(lambda: build(order.config, place=order.place), channel)
    if follow is None:
        return 1
    channel.post(FollowerReady())
    try:
        follow()
    # After any error, this process may differ from the leader, so all processes must start again.
    except Exception as error:
        logger.exception("the process of rank %d died", order.place.rank)
        channel.post(EngineDead(reason=f"{type(error).__name__}: {error}"))
        return 1
    channel.post(EngineDead(reason="it was shut down"))
    return 0


Built = TypeVar("Built")


def _try_to_build(build: Callable[[], Built], channel: ZmqChannel) -> Built | None:
    """Builds the process's part of an engine; None after it has reported an error."""
    try:
        with _start_pulse(channel.count_step):
            return build()
    except ConfigError as error:
        channel.post(EngineStartFailed(message=str(error), is_mistake=True))
    except Exception as error:
        logger.exception("the engine could not be built")
        message = f"the engine could not be built: {type(error).__name__}: {error}"
        channel.post(EngineStartFailed(message=message, is_mistake=False))
    return None
