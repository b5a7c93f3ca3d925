"""Server processes that are forked from one process, which has imported everything before.

Importing a server takes half of what starting and ending one costs.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MAX_MESSAGE_BYTES = 2**17


class ForkedProcess:
    """As much of `subprocess.Popen` as tests use, for a process that is not a child of theirs."""

    def __init__(self, status: socket.socket, outputs: Sequence[int]) -> None:
        self._status = status.makefile("r")
        status.close()
        self.pid = int(self._status.readline())
        self.stdout, self.stderr = (os.fdopen(file, encoding="utf-8") for file in outputs)
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
        return said[0], said[1]

    def __enter__(self) -> "ForkedProcess":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.wait()
        self.stdout.close()
        self.stderr.close()


class ForkedServers:
    """Starts servers.

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

    def start(self, arguments: Sequence[str]) -> ForkedProcess:
        """A process in a session of its own, with this process's environment of now."""
        message = json.dumps([[*arguments], dict(os.environ)]).encode()
        ours, theirs = socket.socketpair()
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        with theirs:
            files = [theirs.fileno(), their_out, their_err]
            socket.send_fds(self._control, [message], files)
            os.close(their_out)
            os.close(their_err)
        return ForkedProcess(ours, (out, err))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


@contextlib.contextmanager
def forked_servers(module: str) -> Iterator[ForkedServers]:
    servers = ForkedServers(module)
    try:
        yield servers
    finally:
        servers.close()


def serve_forks(main: Callable[[Sequence[str]], int]) -> int:
    """Forks a process for each message; returns in it with what `main` returns, and at the end."""
    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            message, files, *_ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 3)
            if not message:
                break
            if os.fork() == 0:
                control.close()
                if _is_server(*files):
                    return _run(main, *json.loads(message))
                os._exit(0)
            for file in files:
                os.close(file)
    # So that their CPU time counts as this process's.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return 0


def _is_server(status: int, out: int, err: int) -> bool:
    """Forks the server; the process in between tells how it ends, and returns False."""
    pid = os.fork()
    if pid:
        os.write(status, f"{pid}\n".encode())
        for file in (0, out, err):
            os.close(file)
        _, code = os.waitpid(pid, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
        return False
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for file in (status, out, err):
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
