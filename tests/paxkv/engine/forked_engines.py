"""Fake engine processes that are forked, which saves the time in which their command imports."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

import pytest

from paxkv.engine.core_process import leave_signals_to_parent, run_engine_process
from paxkv.fleet import engine_process
from tests.paxkv.engine.fake_engine_process import build, build_follower
from tests.paxkv.forked_processes import forked_processes, serve_forks


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Inside, each `EngineProcess` forks a fake engine and ignores its command."""
    with (
        forked_processes("tests.paxkv.engine.forked_engines") as processes,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(engine_process, "_spawn", processes.spawn_engine)
        yield


def _run_engine(_: Sequence[str]) -> int:
    leave_signals_to_parent()
    return run_engine_process(build, build_follower)


if __name__ == "__main__":
    sys.exit(serve_forks(_run_engine))
