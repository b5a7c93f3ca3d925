"""Starts `python -m paxkv.serve` as a user would, on a free loopback port.

Servers whose flags leave the demo model's programs alone load those that the run compiled once.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import IO

from paxkv.config.cache_config import CacheConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from tests.demo_programs import FLAGS, demo_programs
from tests.killed_after import killed_after

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 420
STOP_TIMEOUT_S = 60
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
# The engine's settings that tests use and that change no program.
_SHAPE_NO_PROGRAM = {
    *("served_model_name", "chat_template", "generation_config", "override_generation_config"),
    *("kv_events_config", "trace_file", "policy"),
}
_SHAPE_PROGRAMS = {
    f"--{prefix}{field.name.replace('_', '-')}"
    for config in (ModelConfig, CacheConfig, SchedulerConfig, RunnerConfig, ParallelConfig)
    for field in fields(config)
    if field.name not in _SHAPE_NO_PROGRAM
    for prefix in ("", "no-")
}


class RealServer:
    """A running server process and its address, such as "http://127.0.0.1:43121"."""

    def __init__(self, process: subprocess.Popen, url: str) -> None:
        self.process = process
        self.url = url

    def stop(self) -> int:
        """Asks it to end and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


def has_demo_programs(arguments: Sequence[str]) -> bool:
    """Whether a server with these flags serves the demo model with its default programs."""
    names = {argument.partition("=")[0] for argument in arguments}
    # Without a flag before it, the first argument is a model.
    has_model = bool(arguments) and not arguments[0].startswith("-")
    return not has_model and names.isdisjoint(_SHAPE_PROGRAMS)


@contextlib.contextmanager
def running_server(
    *arguments: str, stderr: IO[bytes] | None = None, variables: Mapping[str, str] = NO_VARIABLES
) -> Iterator[RealServer]:
    """A server that is ready; it is ended, by force if need be, when the block is left.

    Args:
        stderr: Gets what it says there; None is the test's own.
        variables: Environment variables, besides the variables of the test's process.
    """
    command = [sys.executable, "-m", "paxkv.serve", "--port", "0", *arguments]
    if has_demo_programs(arguments):
        command += ["--compiled-dir", str(demo_programs()), *FLAGS]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": ""} | variables,
    )
    try:
        with killed_after(READY_TIMEOUT_S, process):
            line = next((line for line in process.stdout if " is ready at " in line), None)
        if line is None:
            code = process.wait(STOP_TIMEOUT_S)
            raise RuntimeError(f"{command} ended with code {code} before it was ready")
        yield RealServer(process, line.split(" is ready at ")[1].strip().removesuffix("/v1"))
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
