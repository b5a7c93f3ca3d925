"""How a command ends where somebody stops it, or no longer reads what it prints."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
TERMINATED = 143  # 128 + SIGTERM
_STDOUT_CLOSED = 1
_LINE = "paxkv: interrupted."
# Of the first process of a container, whose signals do nothing unless it answers them.
_FIRST_PID = 1


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def end_by_signals() -> None:
    """Lets signals end the process; what a command that is run calls before its imports.

    Ctrl-C does so with a line, until `run_command`: an interruption that meets the import of an
    extension would become an ImportError. SIGTERM ends every process but a container's first one;
    here that one too, until the command answers it otherwise. A signal that means something else
    already, or is ignored, stays what it is.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if os.getpid() == _FIRST_PID and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))


def run_command(main: Callable[[], int | None]) -> int:
    """Runs a command's `main`; returns the exit code of the process.

    Ctrl-C is answered with a line, a reader that goes away (`| head -1`) with none; neither with a
    traceback.
    """
    try:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main()
        # Python's own flush comes too late to be answered.
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(_LINE, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        # What is still in its buffer has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _STDOUT_CLOSED
    return code or 0


@contextlib.contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """In here Ctrl-C ends the process, with a line, and nothing is tidied up first.

    For work of JAX's: an interruption that meets one of its callbacks is lost. Where SIGINT means
    something else already, it goes on to.
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
    """SIGTERM raises `Terminated` in here, so that engine processes end before their parent.

    Without a handler it would do nothing at all to the first process of a container.
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
    # Not through `print`, which may be what was interrupted. A progress bar may be in the line.
    # Nobody may be there to read it.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{_LINE}\n".encode())
    os._exit(INTERRUPTED)


def _is_stdout_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
