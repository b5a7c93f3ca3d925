"""Runs groups of units, each group in its own process, and continues if a process dies.

A kernel that faults makes its process's CUDA context unusable, and a kernel that hangs cannot be
stopped from inside its process. The process that prints the report therefore runs no unit itself.
"""

import itertools
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import jax

from benchmarks.units.unit import PEERS, Measured, Outcome, Result, Unit

POLL_S = 0.5
# The time limit for the start of a process, imports included.
MAX_START_S = 120.0
# After this many crashes and hangs in a group, its other units are skipped in this run, because
# each hang takes a unit's whole time limit.
MAX_DEATHS_PER_GROUP = 3
# Interpreted kernels on a CPU take longer than compiled ones on a GPU.
REHEARSAL_LIMIT_FACTOR = 6
# Parts of messages of `dispatch.run_op`: the op lacks the body, or it cannot take the arguments.
_ABSENT_SIGNS = ("has no such implementation", "cannot do this call")


class ListUnits(Protocol):
    """Returns all units in order. Must be at the top of a module: each process calls it again."""

    def __call__(self, *, is_rehearsal: bool) -> list[Unit]: ...


def measure_device(_: int) -> Measured:
    """The `measure` of the first unit of every run: reads the name of the device that JAX uses."""
    device = jax.devices()[0]
    details = {"device": device.device_kind, "platform": device.platform}
    return Measured(figures={}, details=details)


DEVICE_UNIT = Unit(kind="machine", op="device", case="name", body="jax", measure=measure_device)


def run_units(
    list_units: ListUnits,
    keys: Sequence[str],
    run_seed: int,
    is_rehearsal: bool,
    events: Connection,
    log: Path,
) -> None:
    """The main function of a group's process.

    For each unit, it sends the key before the unit runs, and then the fields of its `Result`.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    # Several processes share the device: memory is allocated when needed.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if is_rehearsal:
        # Threads of XLA's CPU client. An interpreted kernel blocks up to four threads at barriers,
        # and hangs if no thread is left to release them.
        os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
    # The machine may have no network; the Hub's client would wait for it.
    os.environ["HF_HUB_OFFLINE"] = "1"
    known = {unit.key: unit for unit in (DEVICE_UNIT, *list_units(is_rehearsal=is_rehearsal))}
    for key in keys:
        events.send(key)
        events.send(run_unit(known[key], run_seed))


def _end_with_parent() -> None:
    """Ends this process when its parent is gone. A killed parent cannot end its children."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def run_unit(unit: Unit, run_seed: int) -> dict[str, Any]:
    """Runs a unit and returns the fields of its `Result`.

    An exception becomes the outcome of the unit, and does not stop other units.
    """
    started = time.perf_counter()
    fields: dict[str, Any] = {"seed": unit.seed(run_seed), "outcome": "done"}
    try:
        fields["measured"] = unit.measure(fields["seed"])
    except Exception as error:
        text = " ".join(str(error).split())
        lacks_peer = isinstance(error, ModuleNotFoundError) and unit.body in PEERS
        is_absent = lacks_peer or any(sign in text for sign in _ABSENT_SIGNS)
        fields["outcome"] = "absent" if is_absent else "failed"
        fields["reason"] = f"{type(error).__name__}: {text[-600:]}"
        traceback.print_exception(error)
    return fields | {"took_s": round(time.perf_counter() - started, 2)}


class UnitRunner:
    """Runs groups of units and passes every result to `on_result`, one at a time.

    Args:
        folder: Where the output of each process is written.
        run_seed: The seed from which all inputs of the run are drawn.
    """

    def __init__(
        self,
        *,
        folder: Path,
        list_units: ListUnits,
        run_seed: int,
        is_rehearsal: bool,
        on_result: Callable[[Result], None],
    ) -> None:
        self._folder = folder
        self._arguments = (list_units, run_seed, is_rehearsal)
        self._on_result = on_result
        self._lock = threading.Lock()
        self._log_numbers = itertools.count(1)
        self._is_stopped = False

    def run_groups(
        self, groups: Sequence[Sequence[Unit]], *, deadline: float, num_at_once: int = 1
    ) -> None:
        """Runs groups in order, `num_at_once` of them in parallel.

        Args:
            deadline: Time of `time.monotonic` after which no unit starts and running ones are
                killed.
        """
        with ThreadPoolExecutor(num_at_once) as pool:
            try:
                list(pool.map(self._run_group, groups, itertools.repeat(deadline)))
            except BaseException:
                self._is_stopped = True
                raise

    def _run_group(self, group: Sequence[Unit], deadline: float) -> None:
        remaining = {unit.key: unit for unit in group}
        num_deaths = 0
        while remaining:
            if self._is_over(deadline) or num_deaths == MAX_DEATHS_PER_GROUP:
                self._finish_all(
                    remaining, "skipped", "out of time, or too many units of the group crashed"
                )
                return
            current, reason = self._run_process(remaining, deadline)
            if current is not None and not self._is_over(deadline):
                # The next turn starts a process for the remaining units.
                num_deaths += 1
                self._finish_all({current: remaining.pop(current)}, "died", reason)
            elif not self._is_over(deadline):
                # The process could not start or ended between units. The next one would do so too.
                self._finish_all(remaining, "died", reason)

    def _run_process(self, remaining: dict[str, Unit], deadline: float) -> tuple[str | None, str]:
        """Runs units in one process, and removes units with a result from `remaining`.

        Returns:
            The key of the unit in which the process ended, if any, and how it ended.
        """
        log = self._folder / f"process_{next(self._log_numbers):03}.log"
        list_units, run_seed, is_rehearsal = self._arguments
        context = multiprocessing.get_context("spawn")
        events, sender = context.Pipe(duplex=False)
        arguments = (list_units, list(remaining), run_seed, is_rehearsal, sender, log)
        process = context.Process(target=run_units, args=arguments, daemon=True)
        process.start()
        sender.close()  # so that the end of the process ends the pipe
        current, has_ended = None, False
        limit_factor = REHEARSAL_LIMIT_FACTOR if is_rehearsal else 1
        limit_s, last_sign_s = MAX_START_S, time.monotonic()
        with events:
            while remaining and not self._is_over(deadline):
                if not events.poll(POLL_S):
                    if time.monotonic() - last_sign_s > limit_s:
                        break
                    continue
                try:
                    event = events.recv()
                except EOFError:
                    has_ended = True
                    break
                last_sign_s = time.monotonic()
                if isinstance(event, str):
                    current, limit_s = event, limit_factor * remaining[event].time_limit_s
                    continue
                with self._lock:
                    self._on_result(Result(unit=remaining.pop(current), **event))
                current, limit_s = None, MAX_START_S
        silence_s = time.monotonic() - last_sign_s
        if not remaining or has_ended:
            process.join(10)
        process.kill()
        process.join()
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        printed = " / ".join(line.strip() for line in lines if line.strip())[-500:]
        silence = f"silent for {silence_s:.0f} of {limit_s:.0f} s"
        reason = f"{silence}, exit code {process.exitcode}; {printed}"
        process.close()
        return current, reason

    def _is_over(self, deadline: float) -> bool:
        return self._is_stopped or time.monotonic() > deadline

    def _finish_all(self, remaining: dict[str, Unit], outcome: Outcome, reason: str = "") -> None:
        with self._lock:
            for unit in remaining.values():
                self._on_result(Result(unit=unit, outcome=outcome, reason=reason))
        remaining.clear()
