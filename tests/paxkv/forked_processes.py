"""Processes that are forked from one process, which has imported everything before.

Importing a server takes half of what starting and ending one costs; importing an engine without a
device takes most of it.

The process that forks ends with the test process, also if that is killed, and kills the processes
that it forked and that are left then: a stopped engine does not see that its parent is gone.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
_MAX_MESSAGE_BYTES = 2**17
# Files that a fork is sent first get numbers from here on, so that none takes another's place.
_FIRST_SPARE_FILE = 200
_MAX_FILES = 8
# Time for forked processes to end by themselves when the test process no longer needs them.
_END_S = 5.0


class ForkedProcess:
    """As much of `subprocess.Popen` as tests use, for a process that is not a child of theirs."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status.makefile("r")
        status.close()
        self.pid = int(self._status.readline())
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.returncode = int(self._status.readline())
        self._status.close()
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self._ended.is_set():
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        said = ["", ""]

        def read(idx: int) -> None:
            said[idx] = (self.stdout, self.stderr)[idx].read()

        readers = [threading.Thread(target=read, args=(idx,), daemon=True) for idx in (0, 1)]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        # Also to the test's standard error, which pytest shows if the test fails.
        sys.stderr.write(said[1])
        return said[0], said[1]

    def __enter__(self) -> "ForkedProcess":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.wait()
        self.end()

    def end(self) -> None:
        """Kills a server with all processes of its group, and closes the pipes to it.

        What the server wrote to standard error, and no test has read, is written to the test's
        standard error. pytest shows it if the test fails.
        """
        _kill_group(self.pid)
        self.wait()
        sys.stderr.write(self.stderr.read())
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()


class ForkedProcesses:
    """Starts processes.

    Args:
        module: Calls `serve_forks`.
    """

    def __init__(self, module: str) -> None:
        # Each message is a start.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module], cwd=ROOT, stdin=theirs, start_new_session=True
            )

    def start_server(self, arguments: Sequence[str], *, has_input: bool = False) -> ForkedProcess:
        """A process in a session of its own, with this process's environment of now.

        Args:
            has_input: The process reads what is written to `stdin`. False: its input is empty.
        """
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        our_in = None
        if has_input:
            their_in, our_in = os.pipe()
        else:
            their_in = os.open(os.devnull, os.O_RDONLY)
        try:
            process = self._start(arguments, os.environ, {0: their_in, 1: their_out, 2: their_err})
        finally:
            for file in (their_in, their_out, their_err):
                os.close(file)
        if our_in is not None:
            process.stdin = os.fdopen(our_in, "wb", buffering=0)
        process.stdout, process.stderr = (os.fdopen(file, encoding="utf-8") for file in (out, err))
        return process

    def spawn_engine(
        self, command: Sequence[str], environment: Mapping[str, str], file: int
    ) -> ForkedProcess:
        """As `_spawn` of `paxkv.fleet.engine_process`, with another way to run the command."""
        their_in, our_in = os.pipe()
        try:
            process = self._start(
                (), os.environ | environment, {0: their_in, 1: 1, 2: 2, file: file}
            )
        finally:
            os.close(their_in)
        process.stdin = os.fdopen(our_in, "wb", buffering=0)
        return process

    def _start(
        self, arguments: Sequence[str], environment: Mapping[str, str], files: Mapping[int, int]
    ) -> ForkedProcess:
        """Forks a process that has the files of this one under the numbers of the mapping."""
        message = json.dumps([[*arguments], dict(environment), [*files]]).encode()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [message], [theirs.fileno(), *files.values()])
        return ForkedProcess(ours)

    def close(self) -> None:
        self._control.close()
        self._process.wait(_END_S + 60)


@contextlib.contextmanager
def forked_processes(module: str) -> Iterator[ForkedProcesses]:
    processes = ForkedProcesses(module)
    try:
        yield processes
    finally:
        processes.close()


def serve_forks(main: Callable[[Sequence[str]], int]) -> int:
    """Forks a process for each message; returns in it with what `main` returns, and at the end."""
    tellers = []
    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            message, files, *_ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, _MAX_FILES)
            if not message:
                break
            teller = os.fork()
            if teller == 0:
                control.close()
                arguments, environment, numbers = json.loads(message)
                status, *others = files
                if _is_forked(status, dict(zip(numbers, others, strict=True))):
                    return _run(main, arguments, environment)
                os._exit(0)
            tellers.append(teller)
            for file in files:
                os.close(file)
    _end(tellers)
    return 0


def _end(tellers: Sequence[int]) -> None:
    """Waits for the processes that tell how a forked one ends; kills the forked ones after a while.

    The wait also makes their CPU time count as this process's.
    """
    deadline_s = time.monotonic() + _END_S
    left = set(tellers)
    while left and time.monotonic() < deadline_s:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGTERM)
    for pid in left:
        os.waitpid(pid, 0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _is_forked(status: int, files: Mapping[int, int]) -> bool:
    """Forks a child, and returns True there. The parent reports how it ends, and returns False.

    If the parent gets SIGTERM, it kills the child and its group.

    Args:
        files: Number that the process is to have a file under -> the number here.
    """
    pid = os.fork()
    if pid:
        signal.signal(signal.SIGTERM, lambda *_: _kill_group(pid))
        os.write(status, f"{pid}\n".encode())
        for file in (0, *files.values()):
            os.close(file)
        _, code = os.waitpid(pid, 0)
        # The test process may be gone.
        with contextlib.suppress(BrokenPipeError):
            os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
        return False
    os.setsid()
    os.close(status)
    spare = {}
    for number, file in files.items():
        spare[number] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE_FILE)
        os.close(file)
    for number, file in spare.items():
        os.dup2(file, number)
        os.close(file)
    return True


def _run(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], environment: dict[str, str]
) -> int:
    os.environ.clear()
    os.environ.update(environment)
    # The directory for temporary files depends on the environment.
    tempfile.tempdir = None
    return main(arguments)
