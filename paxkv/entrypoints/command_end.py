"""Ends a command on SIGINT, on SIGTERM, and when its output is no longer read."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as in shells
TERMINATED = 143  # 128 + SIGTERM
_STDOUT_CLOSED = 1
_LINE = "paxkv: interrupted."
# Id of the first process of a container. The kernel drops its signals unless it handles them.
_FIRST_PID = 1


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


def end_by_signals() -> None:
    """Installs handlers that end the process on signals. Commands call it before their imports.

    Until `run_command`, Ctrl-C prints a line and ends the process, because a KeyboardInterrupt
    during the import of an extension would become an ImportError. SIGTERM also ends the first
    process of a container, until the command installs another handler. Signals that are ignored or
    have other handlers do not change.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if os.getpid() == _FIRST_PID and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))


def run_command(main: Callable[[], int | None]) -> int:
    """Runs a command's `main`; returns the exit code of the process.

    Ctrl-C prints a line instead of a traceback. If the reader of stdout is gone (`| head -1`), the
    command ends without a message.
    """
    try:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main()
        # Flush here, because errors of Python's own flush at exit cannot be handled.
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(_LINE, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        # Python flushes stdout at exit, so redirect the rest of its buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _STDOUT_CLOSED
    return code or 0


@contextlib.contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """While the context is active, Ctrl-C prints a line and ends the process without cleanup.

    Use it around work in JAX, which loses a KeyboardInterrupt that is raised in one of its
    callbacks. If SIGINT has another handler already, that handler stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """While the context is active, SIGTERM raises `Terminated`.

    So engine processes end before their parent. Without a handler, SIGTERM would not end the first
    process of a container.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def _end(*_: object) -> None:
    # `print` may be the function that was interrupted, so write directly. The line break ends the
    # line of a progress bar. The write fails if stderr is closed.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{_LINE}\n".encode())
    os._exit(INTERRUPTED)


def _is_stdout_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
