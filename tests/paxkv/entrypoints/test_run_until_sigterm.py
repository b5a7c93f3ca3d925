"""SIGTERM cancels the work at any moment."""

import asyncio
import contextlib
import signal

import pytest

from paxkv.entrypoints.command_end import Terminated
from paxkv.entrypoints.run_until_sigterm import run_until_sigterm


def keeps_all_exceptions() -> None:
    """A callback that would catch the exception of a signal handler."""
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)


def test_sigterm_in_a_callback_that_catches_exceptions_ends_the_work():
    ended = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(keeps_all_exceptions)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("tidied up")

    with pytest.raises(Terminated):
        run_until_sigterm(work())
    assert ended == ["tidied up"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_work_without_a_signal_runs_as_in_asyncio():
    async def work(error: BaseException | None) -> int:
        if error is not None:
            raise error
        return 3

    assert run_until_sigterm(work(None)) == 3
    for error in (ValueError("x"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            run_until_sigterm(work(error))
