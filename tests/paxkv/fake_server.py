"""`paxkv.serve` with its flags and signals, over engine processes that need no device."""

import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from paxkv import serve
from paxkv.entrypoints import build_client
from paxkv.fleet import engine_process
from paxkv.fleet.engine_supervisor import EngineSupervisor
from tests.killed_after import killed_after
from tests.paxkv.engine.fake_engine_process import COMMAND
from tests.paxkv.engine.forked_engines import fork_engine
from tests.paxkv.forked_processes import (
    ForkedProcess,
    ForkedProcesses,
    forked_processes,
    serve_forks,
)

START_TIMEOUT_S = 120
END_TIMEOUT_S = 120
_servers: list[ForkedProcesses] = []


class FakeServer:
    """A server process; its engine echoes prompts of token ids."""

    def __init__(self, process: ForkedProcess, url: str) -> None:
        self.process = process
        self.url = url

    @property
    def engine_pid(self) -> int:
        return only_child(self.process.pid)

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=END_TIMEOUT_S).status_code

    def complete(self, prompt: list[int], max_tokens: int) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=END_TIMEOUT_S)

    def wait(self) -> tuple[int, str]:
        """Exit code, and what it said on stderr; call it once."""
        _, said = self.process.communicate(timeout=END_TIMEOUT_S)
        return self.process.returncode, said


def only_child(pid: int) -> int:
    """The one child of a process, whichever of its threads has started it."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    (child,) = " ".join(lists).split()
    return int(child)


@contextlib.contextmanager
def fake_servers() -> Iterator[None]:
    """Inside, servers can be started."""
    with forked_processes("tests.paxkv.fake_server") as servers:
        _servers.append(servers)
        try:
            yield
        finally:
            _servers.pop()


def start_process(*flags: str, forks_engines: bool = False, **settings: object) -> ForkedProcess:
    """A server process with the flags; `settings` are those of `fake_config`.

    It has a process group of its own, so that a test can send a signal to all of it, as a terminal
    does.

    Args:
        forks_engines: The server forks its engines. False: each engine runs a command, which
            spends most of its time on imports.
    """
    way = "fork" if forks_engines else "command"
    return _servers[-1].start_server([way, "--port", "0", *flags, "--model", json.dumps(settings)])


@contextlib.contextmanager
def running_fake_server(*flags: str, **settings: object) -> Iterator[FakeServer]:
    """A server that is ready; what is left of it is killed when the block is left."""
    process = start_process(*flags, forks_engines=True, **settings)
    try:
        with killed_after(START_TIMEOUT_S, process):
            line = process.stdout.readline()
        if " is ready at " not in line:
            _, said = process.communicate(timeout=END_TIMEOUT_S)
            raise RuntimeError(f"the server did not start: {said}")
        url = line.split(" is ready at ")[1].strip().removesuffix("/v1")
        yield FakeServer(process, url)
    finally:
        process.end()


def _run_server(arguments: Sequence[str]) -> int:
    way, *flags = arguments
    if way == "fork":
        engine_process._spawn = fork_engine
    return serve.main(flags)


if __name__ == "__main__":
    build_client.EngineSupervisor = functools.partial(EngineSupervisor, command=COMMAND)
    sys.exit(serve_forks(_run_server))
