"""Runs units in processes of their own, watches them, and goes on after one that dies.

A kernel that faults takes the whole CUDA context with it, one that waits for ever cannot be
stopped from inside: so nothing is run in the process that has to print the table.
"""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.ops.gpu_units import Unit

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
# A kernel that killed so many processes is left alone.
MAX_DEATHS_A_FAMILY = 2
# Patience with a process that starts, or compiles all its units side by side; and with one that
# has done all it had to.
COMPILING_SILENCE_S = 120.0
ENDING_SILENCE_S = 10.0

Outcome = Literal["done", "absent", "failed", "died", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a unit."""

    unit: Unit
    outcome: Outcome
    fields: dict[str, Any] = field(default_factory=dict)  # of its event, see gpu_worker.py
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class _Process:
    """A worker, and what it has said so far."""

    popen: subprocess.Popen
    events: Path
    log: Path
    offset: int = 0
    current: str | None = None
    last_sign: float = field(default_factory=time.monotonic)

    def new_events(self) -> list[dict[str, Any]]:
        """Whole lines that came since the last look."""
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
        """Ends it and what it started."""
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile
        self.popen.wait()

    def tail(self) -> str:
        """The last lines that it printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return " / ".join(line.strip() for line in lines if line.strip())[-500:]


class UnitRunner:
    """Runs groups of units, each group in a process, and hands every result to `on_result`.

    Args:
        folder: Where the processes' events and logs go.
        run_seed: What all inputs of this run are drawn from.
        worker_options: More arguments of the workers, such as `--rehearse`.
        on_result: Called once a unit, from one thread at a time.
        on_device: Called with a worker's description of its device.
        min_silence_s: Patience with every unit, at least.
    """

    def __init__(
        self,
        *,
        folder: Path,
        run_seed: int,
        worker_options: Sequence[str],
        on_result: Callable[[Result], None],
        on_device: Callable[[dict[str, Any]], None],
        min_silence_s: float = 0.0,
        worker_module: str = "benchmarks.ops.gpu_worker",
    ) -> None:
        self._folder = folder
        self._run_seed = run_seed
        self._worker_options = list(worker_options)
        self._on_result = on_result
        self._on_device = on_device
        self._worker_module = worker_module
        self._min_silence_s = min_silence_s
        self._lock = threading.RLock()
        self._num_started = 0
        self._is_stopped = False
        self.deaths: Counter[str] = Counter()  # by family

    def run_groups(
        self, groups: Sequence[Sequence[Unit]], *, deadline: float, num_at_once: int
    ) -> None:
        """Runs groups in order, so many at once, until `deadline` (of `time.monotonic`)."""
        waiting = list(groups)

        def work() -> None:
            while True:
                with self._lock:
                    if not waiting:
                        return
                    group = waiting.pop(0)
                remaining = {unit.key: unit for unit in group}
                try:
                    self._run_group(remaining, deadline=deadline)
                # A mistake here must not cost the report of everything else.
                except Exception as error:
                    traceback.print_exception(error)
                    self._finish_all(remaining, "failed", f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work) for _ in range(num_at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        """Ends the processes and skips what is left, as if it were past every deadline."""
        self._is_stopped = True  # no lock: a signal's handler calls this

    def _is_over(self, deadline: float) -> bool:
        return self._is_stopped or time.monotonic() > deadline

    def _run_group(self, remaining: dict[str, Unit], *, deadline: float) -> None:
        is_serial = False
        while remaining:
            self._skip_deadly(remaining)
            if not remaining:
                return
            if self._is_over(deadline):
                self._finish_all(remaining, "skipped", "out of time")
                return
            num_before = len(remaining)
            process = self._start(list(remaining), is_serial)
            ended_by = self._watch(process, remaining, deadline)
            if not remaining:
                return
            if ended_by == "deadline":
                self._finish_all(remaining, "skipped", "out of time")
                return
            reason = f"{ended_by}; {process.tail()}"
            if process.current in remaining:
                unit = remaining.pop(process.current)
                with self._lock:
                    self.deaths[unit.family] += 1
                self._finish(Result(unit=unit, outcome="died", reason=reason))
                # Side by side, all are compiled before the first starts: it was not the compiler.
                continue
            if len(remaining) == num_before and is_serial:
                # Not even the first unit was reached, by a process that only imports.
                self._finish_all(remaining, "died", reason)
            # Whose compiling killed it is seen when the rest is compiled one by one.
            is_serial = True

    def _skip_deadly(self, remaining: dict[str, Unit]) -> None:
        for unit in list(remaining.values()):
            num_deaths = self.deaths[unit.family]
            if unit.kind == "time":
                num_deaths += self.deaths[unit.family.replace("time", "check", 1)]
            if num_deaths >= MAX_DEATHS_A_FAMILY:
                del remaining[unit.key]
                reason = f"{unit.op} as {unit.body} had killed {num_deaths} processes before"
                self._finish(Result(unit=unit, outcome="skipped", reason=reason))

    def _start(self, keys: list[str], is_serial: bool) -> _Process:
        with self._lock:
            self._num_started += 1
            name = f"process_{self._num_started:03}"
        units_file, events, log = (
            self._folder / f"{name}.{suffix}" for suffix in ("units.json", "jsonl", "log")
        )
        units_file.write_text(json.dumps(keys))
        events.unlink(missing_ok=True)  # of an earlier run in the same folder
        command = [sys.executable, "-u", "-m", self._worker_module]
        command += ["--units", str(units_file), "--events", str(events)]
        command += ["--seed", str(self._run_seed), *self._worker_options]
        # Memory is taken as it is needed: other processes check on the same device.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with log.open("w") as out:
            popen = subprocess.Popen(
                command + (["--serial"] if is_serial else []),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _Process(popen=popen, events=events, log=log)

    def _watch(self, process: _Process, remaining: dict[str, Unit], deadline: float) -> str:
        """Takes in events until the process ends; returns how it did."""
        while True:
            has_ended = process.popen.poll() is not None
            for event in process.new_events():
                self._take(event, process, remaining)
            if has_ended:
                return f"its process ended with {process.popen.returncode}"
            if self._is_over(deadline):
                process.kill()
                return "deadline"
            limit_s = COMPILING_SILENCE_S if remaining else ENDING_SILENCE_S
            if process.current in remaining:
                limit_s = remaining[process.current].silence_limit_s
            limit_s = max(limit_s, self._min_silence_s)
            if time.monotonic() - process.last_sign > limit_s:
                process.kill()
                return f"no sign of life for {limit_s:.0f} s"
            time.sleep(POLL_S)

    def _take(self, event: dict[str, Any], process: _Process, remaining: dict[str, Unit]) -> None:
        name = event["event"]
        if name == "device":
            with self._lock:
                self._on_device(event)
        elif name == "start":
            process.current = event["unit"]
        elif name in ("done", "absent", "failed"):
            process.current = None
            unit = remaining.pop(event["unit"])
            reason = event.get("reason", "")
            self._finish(Result(unit=unit, outcome=name, fields=event, reason=reason))

    def _finish_all(self, remaining: dict[str, Unit], outcome: Outcome, reason: str) -> None:
        for unit in remaining.values():
            self._finish(Result(unit=unit, outcome=outcome, reason=reason))
        remaining.clear()

    def _finish(self, result: Result) -> None:
        with self._lock:
            self._on_result(result)
