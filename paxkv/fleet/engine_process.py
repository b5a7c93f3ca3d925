"""`EngineProcess`: the server's handle on one engine process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import zmq

from paxkv.config.engine_config import EngineConfig
from paxkv.contracts import wire
from paxkv.contracts.engine_output import EngineDead, EngineOutput
from paxkv.contracts.engine_request import EngineInput, Shutdown
from paxkv.contracts.engine_start import (
    CurveKeys,
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
from paxkv.errors import ConfigError, EngineDeadError, InvariantError
from paxkv.fleet.socket_folder import SocketFolder, remove_stale_folders
from paxkv.fleet.step_watch import StepWatch

# A fresh interpreter, because a fork of a process with threads or with a device may hang. -P keeps
# the working directory out of its module path; `_spawn` passes the path of this process.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "paxkv.entrypoints.engine_process")
# Time for the engine to end its current step after `Shutdown`; then it is killed.
CLOSE_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 5.0
# Time for a hanging engine to print a traceback before it is killed.
_TRACEBACK_S = 0.5
_START_POLL_MS = 100
_CONNECT_TIMEOUT_MS = 5000
_CONNECT_POLL_MS = 20
# Longest time to handle messages before other callbacks of the loop may run.
_MAX_TURN_S = 0.02
# The path of a socket file may have 107 bytes on Linux, 103 on macOS.
_MAX_IPC_PATH = 100
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class EngineProcess:
    """One engine process, from its start to its end.

    `send` and `end` may be called from any thread. Call `wait_until_ready` first, on one thread.
    After `deliver_on`, messages are received only on its loop.

    Args:
        show_progress: The engine draws a progress bar on stderr while it compiles programs.
        command: Command line of a program that calls `run_engine_process`.
        environment: Variables to add to the environment of this process.
        max_idle_start_s: Kills the engine if it does nothing for this many seconds before it is
            ready; 0 is no limit.
        place: Number of the process among the processes of the engine. None: it is the only one.

    Attributes:
        num_sent: Number of messages that were sent to the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        show_progress: bool,
        command: Sequence[str] = ENGINE_COMMAND,
        environment: Mapping[str, str] = MappingProxyType({}),
        max_idle_start_s: float = 0.0,
        place: RankPlace | None = None,
    ) -> None:
        self._place = place
        self._start_watch = StepWatch(max_idle_start_s)
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._is_released = False
        self._is_starting = True
        self.num_sent = 0
        self._inputs: zmq.Socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[EngineOutput | EngineStartOutput], None] = _drop
        self._folder: SocketFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._outputs = self._context.socket(zmq.PULL)
            self._outputs.set_hwm(0)  # unlimited queue: no message may be dropped
            self._step_counter, counter_file = StepCounter.create()
            try:
                with _deferred_signals():
                    order = self._open_endpoints(
                        config, show_progress=show_progress, step_counter=counter_file
                    )
                    self._curve_keys = order.curve_keys
                    self._process = _spawn(command, environment, counter_file)
                    self._send_order(order)
            finally:
                os.close(counter_file)
        except BaseException:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process.stdin.close()
            self._release_sockets()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def step_count(self) -> int:
        """`StepCounter.count` of the engine."""
        return self._step_counter.count

    def wait_until_ready(
        self, on_model_found: Callable[[Path], None] = lambda folder: None
    ) -> EngineReady:
        """Waits until the engine accepts requests.

        Args:
            on_model_found: Called with the folder of the model's tokenizer, while the engine
                continues its start.

        Raises:
            ConfigError: A setting or the model's files are invalid.
            EngineDeadError: The engine ended before it was ready.
        """
        while True:
            match self._next_start_message():
                case EngineHello(input_endpoint=endpoint):
                    self._connect_inputs(endpoint)
                case ModelFound(folder=folder):
                    on_model_found(Path(folder))
                case EngineReady() as ready:
                    self._is_starting = False
                    return ready
                case EngineStartFailed(message=message, is_mistake=is_mistake):
                    self._is_starting = False
                    raise ConfigError(message) if is_mistake else EngineDeadError(message)
                case other:
                    raise InvariantError(f"received {type(other).__name__} before EngineReady.")

    def wait_until_ended(self) -> str:
        """Waits for the end of a follower, which sends no outputs; returns the reason."""
        try:
            while True:
                match self._next_start_message():
                    case EngineHello(input_endpoint=endpoint):
                        self._connect_inputs(endpoint)
                    case FollowerReady():
                        self._is_starting = False
                    case EngineStartFailed(message=message):
                        return message
                    case EngineDead(reason=reason):
                        return reason
                    case other:
                        return f"it sent an unexpected {type(other).__name__}."
        except (EngineDeadError, InvariantError) as error:
            return str(error)

    def send(self, message: EngineInput) -> None:
        """Queues a message; never waits.

        Raises:
            EngineDeadError: The engine has ended, or is not connected yet.
        """
        data = wire.encode(message)
        # Another thread may call `end` or `release` while the client sends.
        with self._lock:
            if self._inputs is None:
                raise EngineDeadError("the engine has ended.")
            self._inputs.send(data)
            self.num_sent += 1

    def deliver_on(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[EngineOutput | EngineStartOutput], None],
    ) -> None:
        """Calls `on_message` on the loop with every message from now on. Call it on the loop."""
        # Not in a reader thread, which would compete with the loop for the interpreter.
        self._loop, self._on_message = loop, on_message
        loop.add_reader(self._outputs.fd, self._deliver_waiting)
        # The descriptor signals only new messages, so read waiting messages now.
        loop.call_soon(self._deliver_waiting)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Returns the exit code, negative for a signal; None if it still runs at the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Ends the process after its current step; may be repeated.

        Kills a process that is still starting: it reads no messages yet and has no requests.
        """
        if self._is_starting:
            self._process.kill()
        else:
            with contextlib.suppress(EngineDeadError):
                self.send(Shutdown())
                self.wait(CLOSE_TIMEOUT_S)
        self._process.stdin.close()  # the engine exits when its standard input closes
        if self.wait(_EXIT_TIMEOUT_S) is None:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Kills the process; may be repeated."""
        self._process.kill()

    def kill_with_traceback(self) -> None:
        """Makes the process print a traceback on stderr, then kills it. Call it on the loop."""
        self._process.send_signal(signal.SIGUSR1)
        self._loop.call_later(_TRACEBACK_S, self._process.kill)

    def release(self) -> None:
        """Delivers the remaining messages and closes the sockets. The process must have ended.

        Call it on the loop of `deliver_on`, if that was called.
        """
        if self._is_released:
            return
        if self._loop is not None:
            while self._deliver_one():
                pass
            self._loop.remove_reader(self._outputs.fd)
        self._process.stdin.close()
        self._release_sockets()

    def _open_endpoints(
        self, config: EngineConfig, *, show_progress: bool, step_counter: int
    ) -> EngineOrder:
        """Binds the socket for the engine's messages and returns what the engine needs to start."""
        if zmq.has("ipc"):
            remove_stale_folders()
            self._folder = SocketFolder()
            if len(str(self._folder.path)) > _MAX_IPC_PATH - len("/outputs"):
                self._folder.remove()
                self._folder = None
        if self._folder is not None:
            input_endpoint, output_endpoint, keys = (
                f"ipc://{self._folder.path}/inputs",
                f"ipc://{self._folder.path}/outputs",
                None,
            )
        else:
            input_endpoint = output_endpoint = "tcp://127.0.0.1:*"
            (input_public, input_secret), (output_public, output_secret) = (
                (public.decode(), secret.decode())
                for public, secret in (zmq.curve_keypair(), zmq.curve_keypair())
            )
            keys = CurveKeys(
                input_public=input_public, input_secret=input_secret, output_public=output_public
            )
            self._outputs.curve_server = True
            self._outputs.curve_secretkey = output_secret.encode()
        self._outputs.bind(output_endpoint)
        return EngineOrder(
            config=config,
            input_endpoint=input_endpoint,
            output_endpoint=self._outputs.getsockopt_string(zmq.LAST_ENDPOINT),
            step_counter=step_counter,
            folder=None if self._folder is None else str(self._folder.path),
            curve_keys=keys,
            show_progress=show_progress,
            place=self._place,
        )

    def _send_order(self, order: EngineOrder) -> None:
        data = msgspec.json.encode(order) + b"\n"
        try:
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
        except BrokenPipeError:
            # The process ended already; `wait_until_ready` reports it.
            return

    def _connect_inputs(self, endpoint: str) -> None:
        """Connects to the engine's bound socket. ZeroMQ would retry earlier attempts too slowly."""
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        if self._curve_keys is not None:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = self._curve_keys.input_public.encode()
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(endpoint)
        # Stop waiting if the process has ended because its start failed.
        is_connected = any(
            monitor.poll(_CONNECT_POLL_MS) or self._process.poll() is not None
            for _ in range(_CONNECT_TIMEOUT_MS // _CONNECT_POLL_MS)
        )
        socket.disable_monitor()
        monitor.close(linger=0)
        with self._lock:
            self._inputs = socket
        if is_connected and self._folder is not None:
            # Both sockets are connected (the engine's hello used the other one). Remove their files
            # now, because the files would remain if both processes were killed.
            self._folder.remove()

    def _next_start_message(self) -> EngineOutput | EngineStartOutput:
        while True:
            self._check_start()
            # Poll the process before the socket, so that messages sent before its end are read.
            code = self._process.poll()
            if self._outputs.poll(_START_POLL_MS):
                return wire.decode_output(self._outputs.recv())
            if code is not None:
                before = "before it was ready" if self._is_starting else "unexpectedly"
                raise EngineDeadError(f"the engine ended {before}: {describe_end(code)}")

    def _check_start(self) -> None:
        """Kills a process that does nothing although it is not ready.

        Raises:
            EngineDeadError: The process did nothing for `max_idle_start_s`.
        """
        watch = self._start_watch
        # `| 1`: an odd count means that the engine has work, and a starting engine always has.
        if not self._is_starting or watch.limit_s <= 0:
            return
        if watch.is_too_long(self.step_count | 1, 0, time.monotonic()):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_TRACEBACK_S)
            self._process.kill()
            raise EngineDeadError(
                "the engine was killed, because its start hangs: it has done nothing for "
                f"{watch.limit_s:g} seconds, the limit that --engine-ready-timeout-s sets. Its log "
                "contains the traceback; if the start is only slow, raise the limit."
            )

    def _deliver_waiting(self) -> None:
        end_s = time.monotonic() + _MAX_TURN_S
        while self._deliver_one():
            if time.monotonic() >= end_s:
                self._loop.call_soon(self._deliver_waiting)
                return

    def _deliver_one(self) -> bool:
        """Delivers one message; False if none is waiting."""
        if self._is_released:
            return False
        try:
            message = wire.decode_output(self._outputs.recv(zmq.NOBLOCK))
        except zmq.Again:
            return False
        except InvariantError as error:
            # After an invalid message, later messages cannot be trusted either.
            message = EngineDead(reason=f"{type(error).__name__}: {error}")
            self._process.kill()
        self._on_message(message)
        return True

    def _release_sockets(self) -> None:
        with self._lock:
            self._is_released = True
            self._context.destroy(linger=0)
            self._inputs = None
        if self._folder is not None:
            self._folder.remove()


def describe_end(code: int) -> str:
    """Describes why a process ended unexpectedly, from its exit code."""
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL), as the system does when memory runs out."
    if code < 0:
        return f"it was ended by signal {-code} ({signal.Signals(-code).name})."
    return f"it exited with code {code}; its log says more."


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], file: int
) -> subprocess.Popen[bytes]:
    """Starts the process. It inherits the descriptor `file` besides the standard streams."""
    # The process finds the same modules as this one.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    variables = os.environ | {"PYTHONPATH": path} | environment
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, bufsize=0, env=variables, pass_fds=(file,)
    )


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """Delays SIGINT and SIGTERM until the block ends, so that they leave no process behind.

    A process that is started in the block inherits the signal mask. So the signals cannot end it
    before it ignores them.
    """
    received: list[int] = []
    previous = {}
    # The mask covers only this thread. Handlers are needed too, because the system may deliver the
    # signal to a thread of a library.
    if threading.current_thread() is threading.main_thread():
        previous = {
            number: signal.signal(number, lambda number, frame: received.append(number))
            for number in _SIGNALS
        }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous.items():
            # None is a handler that was not installed by Python; it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in received:
            signal.raise_signal(number)


def _drop(_message: EngineOutput | EngineStartOutput) -> None:
    """Ignores messages before `deliver_on`."""
