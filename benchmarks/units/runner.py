"""Runs groups of units in worker processes, watches them, and continues after one that dies.

A kernel that faults takes its CUDA context with it, and one that hangs cannot be stopped from
inside its process. The process that prints the report therefore runs no unit itself.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.units.unit import Outcome, Result, Unit, measured_from_json

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
# Units of a family that killed this many processes are skipped.
MAX_DEATHS_PER_FAMILY = 2
# Patience with a process before its first unit, and after its last.
STARTING_SILENCE_S = 120.0
ENDING_SILENCE_S = 10.0


@dataclasses.dataclass(slots=True, kw_only=True)
class _Process:
    """A worker and the events read from it so far."""

    popen: subprocess.Popen
    events: Path
    log: Path
    offset: int = 0
    current: str | None = None
    last_sign: float = dataclasses.field(default_factory=time.monotonic)

    def new_events(self) -> list[dict[str, Any]]:
        """Complete lines written since the last call."""
        if not self.events.is_file():
            return []
        with self.events.open("rb") as stream:
            stream.seek(self.offset)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        events = [json.loads(line) for line in whole.splitlines()]
        if events:
            self.last_sign = time.monotonic()
        return events

    def kill(self) -> None:
        """Kills the process and its children."""
        with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def tail(self) -> str:
        """The last lines that the process printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return " / ".join(line.strip() for line in lines if line.strip())[-500:]


class UnitRunner:
    """Runs groups of units, one process per group, and passes every result to `on_result`.

    Args:
        folder: Receives the processes' events and logs.
        listed_by: "module:function" that lists all units.
        run_seed: All inputs of the run are drawn from it.
        on_result: Called once per unit, by one thread at a time.
    """

    def __init__(
        self,
        *,
        folder: Path,
        listed_by: str,
        run_seed: int,
        is_rehearsal: bool,
        on_result: Callable[[Result], None],
        worker_module: str = "benchmarks.units.worker",
    ) -> None:
        self._folder = folder
        self._arguments = ["--listed-by", listed_by, "--seed", str(run_seed)]
        self._arguments += ["--rehearse"] * is_rehearsal
        self._on_result = on_result
        self._worker_module = worker_module
        self._lock = threading.RLock()
        self._num_started = 0
        self._is_stopped = False
        self._deaths: Counter[str] = Counter()  # by family

    def run_groups(
        self, groups: Sequence[Sequence[Unit]], *, deadline: float, num_at_once: int = 1
    ) -> None:
        """Runs groups in order, `num_at_once` in parallel, until `deadline` (monotonic)."""
        waiting = list(groups)

        def work() -> None:
            while True:
                with self._lock:
                    if not waiting:
                        return
                    group = waiting.pop(0)
                remaining = {unit.key: unit for unit in group}
                try:
                    self._run_group(remaining, deadline)
                # An error of the runner must not cost the report of all other units.
                except Exception as error:
                    traceback.print_exception(error)
                    self._finish_all(remaining, "failed", f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work) for _ in range(num_at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        """Kills the processes and skips all other units, as if every deadline had passed."""
        self._is_stopped = True  # without the lock: a signal handler calls this

    def _is_over(self, deadline: float) -> bool:
        return self._is_stopped or time.monotonic() > deadline

    def _run_group(self, remaining: dict[str, Unit], deadline: float) -> None:
        while remaining:
            self._skip_deadly(remaining)
            if self._is_over(deadline):
                self._finish_all(remaining, "skipped", "out of time")
            if not remaining:
                return
            process = self._start(list(remaining))
            ended_by = self._watch(process, remaining, deadline)
            reason = f"{ended_by}; {process.tail()}"
            if ended_by == "deadline":
                self._finish_all(remaining, "skipped", "out of time")
            elif process.current in remaining:
                unit = remaining.pop(process.current)
                with self._lock:
                    self._deaths[unit.family] += 1
                self._finish(Result(unit=unit, outcome="died", reason=reason))
            else:
                # It ended between units, or could not even start: the next process would too.
                self._finish_all(remaining, "died", reason)

    def _skip_deadly(self, remaining: dict[str, Unit]) -> None:
        for unit in list(remaining.values()):
            num_deaths = self._deaths[unit.family]
            if num_deaths >= MAX_DEATHS_PER_FAMILY:
                del remaining[unit.key]
                reason = f"{unit.op} as {unit.body} killed {num_deaths} processes before"
                self._finish(Result(unit=unit, outcome="skipped", reason=reason))

    def _start(self, keys: list[str]) -> _Process:
        with self._lock:
            self._num_started += 1
            name = f"process_{self._num_started:03}"
        units_file, events, log = (
            self._folder / f"{name}.{suffix}" for suffix in ("units.json", "jsonl", "log")
        )
        units_file.write_text(json.dumps(keys))
        events.unlink(missing_ok=True)  # of an earlier run in the same folder
        command = [sys.executable, "-u", "-m", self._worker_module, *self._arguments]
        with log.open("w") as out:
            popen = subprocess.Popen(
                [*command, "--units", str(units_file), "--events", str(events)],
                cwd=ROOT,
                # Several processes share the device: memory is allocated when needed.
                env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _Process(popen=popen, events=events, log=log)

    def _watch(self, process: _Process, remaining: dict[str, Unit], deadline: float) -> str:
        """Reads events until the process ends; returns how it ended."""
        while True:
            has_ended = process.popen.poll() is not None
            for event in process.new_events():
                self._take(event, process, remaining)
            if has_ended:
                return f"its process ended with {process.popen.returncode}"
            if self._is_over(deadline):
                process.kill()
                return "deadline"
            limit_s = STARTING_SILENCE_S if remaining else ENDING_SILENCE_S
            if process.current in remaining:
                limit_s = remaining[process.current].silence_limit_s
            if time.monotonic() - process.last_sign > limit_s:
                process.kill()
                return f"no sign of life for {limit_s:.0f} s"
            time.sleep(POLL_S)

    def _take(self, event: dict[str, Any], process: _Process, remaining: dict[str, Unit]) -> None:
        if event["event"] == "start":
            process.current = event["unit"]
            return
        process.current = None
        self._finish(
            Result(
                unit=remaining.pop(event["unit"]),
                outcome=event["event"],
                measured=measured_from_json(event) if event["event"] == "done" else None,
                reason=event.get("reason", ""),
                seed=event["seed"],
                took_s=event["took_s"],
            )
        )

    def _finish_all(self, remaining: dict[str, Unit], outcome: Outcome, reason: str) -> None:
        for unit in remaining.values():
            self._finish(Result(unit=unit, outcome=outcome, reason=reason))
        remaining.clear()

    def _finish(self, result: Result) -> None:
        with self._lock:
            self._on_result(result)
