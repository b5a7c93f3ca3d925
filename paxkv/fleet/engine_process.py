"""`EngineProcess`: an engine in a process of its own, as the process that started it sees it."""

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
    ModelFound,
)
from paxkv.contracts.step_counter import StepCounter
from paxkv.errors import ConfigError, EngineDeadError, InvariantError
from paxkv.fleet.socket_folder import SocketFolder, remove_stale_folders
from paxkv.fleet.step_watch import StepWatch

# A fresh interpreter: a fork of a process with threads, or of one that has a device, may hang. -P
# leaves the working directory out of its path, which is ours.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "paxkv.entrypoints.engine_process")
# The step that it computes now may take so long to end; then the process is killed.
CLOSE_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 5.0
# An engine that hangs says where, if it still can.
_TRACEBACK_S = 0.5
_START_POLL_MS = 100
_CONNECT_TIMEOUT_MS = 5000
_CONNECT_POLL_MS = 20
# After this time with messages of the engine, the loop runs other callbacks.
_MAX_TURN_S = 0.02
# The address of a socket file may have 107 bytes on Linux, 103 on macOS.
_MAX_IPC_PATH = 100
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class EngineProcess:
    """One engine process, from its start to its end.

    `send` and `end` may be called from any thread. `wait_until_ready` belongs to who made it;
    afterwards messages are received on one loop alone.

    Args:
        show_progress: It draws a bar on stderr while steps compile.
        command: What runs `run_engine_process`.
        environment: Variables that it is started with, besides those of this process.
        max_idle_start_s: Seconds that it may do nothing before it is ready; 0 is no limit.

    Attributes:
        num_sent: Messages that were sent to it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        show_progress: bool,
        command: Sequence[str] = ENGINE_COMMAND,
        environment: Mapping[str, str] = MappingProxyType({}),
        max_idle_start_s: float = 0.0,
    ) -> None:
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
            self._outputs.set_hwm(0)  # no limit: nothing may be lost
            self._step_counter, counter_file = StepCounter.create()
            try:
                with _later_signals():
                    order = self._open_endpoints(
                        config, show_progress=show_progress, step_counter=counter_file
                    )
                    self._curve_keys = order.curve_keys
                    self._process = _spawn(command, environment, counter_file)
                    self._give_order(order)
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
        """Waits until the engine takes requests.

        Args:
            on_model_found: Called with the folder of the model's tokenizer, while the engine goes
                on starting.

        Raises:
            ConfigError: A setting or the model's files cannot work.
            EngineDeadError: It ended before it was ready.
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
                    raise InvariantError(f"{type(other).__name__} came before EngineReady.")

    def send(self, message: EngineInput) -> None:
        """Queues a message; never waits.

        Raises:
            EngineDeadError: The engine has ended, or has not begun.
        """
        data = wire.encode(message)
        # The client speaks on one thread; but whoever ends this comes from another.
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
        """Calls `on_message` with every message from now on. Called on the loop.

        No thread stands between: it would compete with the loop for the interpreter at every step.
        """
        self._loop, self._on_message = loop, on_message
        loop.add_reader(self._outputs.fd, self._take_waiting)
        # The descriptor tells of what is new only.
        loop.call_soon(self._take_waiting)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The process's exit code, below 0 for a signal; None while it lives after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Ends the process after the step that it computes now; may be repeated.

        One that is still starting ends at once: it would hear of nothing, and nothing is lost.
        """
        if self._is_starting:
            self._process.kill()
        else:
            with contextlib.suppress(EngineDeadError):
                self.send(Shutdown())
                self.wait(CLOSE_TIMEOUT_S)
        self._process.stdin.close()  # which ends it without more ado
        if self.wait(_EXIT_TIMEOUT_S) is None:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Ends the process now; may be repeated."""
        self._process.kill()

    def kill_with_traceback(self) -> None:
        """Has the process say on stderr where it is, and kills it. Called on the loop."""
        self._process.send_signal(signal.SIGUSR1)
        self._loop.call_later(_TRACEBACK_S, self._process.kill)

    def release(self) -> None:
        """Hands over what has come, and gives the sockets back. The process must have ended.

        Called on the loop of `deliver_on`, if there was one.
        """
        if self._is_released:
            return
        if self._loop is not None:
            while self._take_one():
                pass
            self._loop.remove_reader(self._outputs.fd)
        self._process.stdin.close()
        self._release_sockets()

    def _open_endpoints(
        self, config: EngineConfig, *, show_progress: bool, step_counter: int
    ) -> EngineOrder:
        """Binds the socket to hear on."""
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
        )

    def _give_order(self, order: EngineOrder) -> None:
        data = msgspec.json.encode(order) + b"\n"
        try:
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
        except BrokenPipeError:
            # It ended at once, which `wait_until_ready` says.
            return

    def _connect_inputs(self, endpoint: str) -> None:
        """Only now: a socket that connects before the other listens looks again much later."""
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        if self._curve_keys is not None:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = self._curve_keys.input_public.encode()
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(endpoint)
        # One whose start has failed may be gone already.
        is_connected = any(
            monitor.poll(_CONNECT_POLL_MS) or self._process.poll() is not None
            for _ in range(_CONNECT_TIMEOUT_MS // _CONNECT_POLL_MS)
        )
        socket.disable_monitor()
        monitor.close(linger=0)
        with self._lock:
            self._inputs = socket
        if is_connected and self._folder is not None:
            # Its hello came through the other socket: nobody looks for their files any more, which
            # would stay behind if both processes were killed.
            self._folder.remove()

    def _next_start_message(self) -> EngineOutput | EngineStartOutput:
        while True:
            self._check_start()
            # Asked first: what it said before it ended is read all the same.
            code = self._process.poll()
            if self._outputs.poll(_START_POLL_MS):
                return wire.decode_output(self._outputs.recv())
            if code is not None:
                raise EngineDeadError(f"the engine ended before it was ready: {describe_end(code)}")

    def _check_start(self) -> None:
        """Ends a process that does nothing although it is not ready.

        Raises:
            EngineDeadError: It did nothing for too long.
        """
        watch = self._start_watch
        # Odd: it has something to do.
        if watch.limit_s > 0 and watch.is_too_long(self.step_count | 1, 0, time.monotonic()):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_TRACEBACK_S)
            self._process.kill()
            raise EngineDeadError(
                "the engine was killed, because its start hangs: it has done nothing for "
                f"{watch.limit_s:g} seconds, the limit that --engine-ready-timeout-s sets. Its log "
                "says where it stood."
            )

    def _take_waiting(self) -> None:
        end_s = time.monotonic() + _MAX_TURN_S
        while self._take_one():
            if time.monotonic() >= end_s:
                self._loop.call_soon(self._take_waiting)
                return

    def _take_one(self) -> bool:
        """Hands over a message; False if there is none."""
        if self._is_released:
            return False
        try:
            message = wire.decode_output(self._outputs.recv(zmq.NOBLOCK))
        except zmq.Again:
            return False
        except InvariantError as error:
            # Nothing that follows can be trusted.
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
    """What an exit code says of a process that nobody asked to end."""
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL), as the system does when memory runs out."
    if code < 0:
        return f"signal {-code} ({signal.Signals(-code).name}) ended it."
    return f"it exited with code {code}; its log says more."


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], file: int
) -> subprocess.Popen[bytes]:
    """Starts the process, which inherits one open file besides the standard ones."""
    # It finds the modules that this process finds.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    variables = os.environ | {"PYTHONPATH": path} | environment
    # Without a buffer: the pipe stays open, and is written to once.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, bufsize=0, env=variables, pass_fds=(file,)
    )


@contextlib.contextmanager
def _later_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait: whoever could remove the sockets' folder must hear of it first.

    A process that is started meanwhile has them blocked: they must not end it before it ignores
    them.
    """
    came: list[int] = []
    previous = {}
    # The mask is of this thread alone, and libraries have others.
    if threading.current_thread() is threading.main_thread():
        previous = {
            number: signal.signal(number, lambda number, frame: came.append(number))
            for number in _SIGNALS
        }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous.items():
            # None: not Python's own, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


def _drop(_message: EngineOutput | EngineStartOutput) -> None:
    """Before `deliver_on`."""
