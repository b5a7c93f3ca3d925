"""The process of one engine: loads it, then runs the workload for each command on stdin.

`process.py` starts it, already pinned. Each line of stdin and of stdout is a JSON object; output of
libraries goes to stderr. Between commands, the process waits without using the processor.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

from benchmarks.engine.offline_engine import EngineRun, EngineSpec, OfflineEngine
from benchmarks.workloads import Workload
from paxkv.errors import PaxkvError

# Size of the runs that warm up.
WARM_UP_REQUESTS = 16
WARM_UP_OUTPUT_TOKENS = 4


def cpu_time_s() -> float:
    """CPU time of this process and of its running children.

    The children's time is in whole ticks of the system's clock, 0.01 s each.
    """
    ticks = 0
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in file.read_text().split():
            # A child may end at any time.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # After the name, which may hold any character: state, ..., user and system time.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


class Worker:
    """Runs commands on one engine."""

    def __init__(self, engine: OfflineEngine, workload: Workload) -> None:
        self._engine = engine
        self._workload = workload
        self._idle_since = (time.perf_counter(), cpu_time_s())

    def answer(self, command: dict[str, object]) -> dict[str, object]:
        """Runs one command; returns its answer."""
        if command["command"] == "run":
            run = self._run(command["settings"], is_warm_up=command["is_warm_up"])
            return dataclasses.asdict(run)
        if command["command"] == "logit_gap":
            tokens = command["token_ids"]
            gap = self._engine.logit_gap(tokens, command["first"], command["second"])
            return {"logit_gap": gap}
        raise ValueError(f"command must be run or logit_gap, got {command['command']!r}.")

    def _run(self, settings: dict[str, object], *, is_warm_up: bool) -> EngineRun:
        wall, cpu = time.perf_counter(), cpu_time_s()
        idle_wall_s, idle_cpu_s = wall - self._idle_since[0], cpu - self._idle_since[1]
        workload = self._workload
        if is_warm_up:
            workload = workload.first(WARM_UP_REQUESTS, WARM_UP_OUTPUT_TOKENS)
        self._engine.prepare()
        gc.collect()
        wall, cpu = time.perf_counter(), cpu_time_s()
        output = self._engine.run(workload, **settings)
        wall_s, cpu_s = time.perf_counter() - wall, cpu_time_s() - cpu
        _check_lengths(workload, output.token_ids)
        self._idle_since = (time.perf_counter(), cpu_time_s())
        return EngineRun(
            token_ids=output.token_ids,
            figures=output.figures,
            wall_s=wall_s,
            cpu_s=cpu_s,
            idle_wall_s=idle_wall_s,
            idle_cpu_s=idle_cpu_s,
        )


def _check_lengths(workload: Workload, token_ids: list[list[int]]) -> None:
    """Checks that every request has all its tokens, so that all engines do the same work."""
    wanted = [request.num_output_tokens for request in workload.requests]
    got = list(map(len, token_ids))
    if got != wanted:
        raise ValueError(f"output lengths are wrong: got {got}, wanted {wanted}.")


def _serve(commands: TextIO, answers: TextIO) -> None:
    start = json.loads(commands.readline())
    spec = EngineSpec(**start["spec"])
    workload = Workload.read(Path(start["workload"]))
    try:
        engine = importlib.import_module(spec.module).load_engine(spec, workload)
    # A rejected setting, a wrong model, or a peer that is not installed. Any other error is a
    # crash, whose traceback is in the log.
    except (PaxkvError, ValueError, ImportError) as error:
        traceback.print_exception(error)
        _answer(answers, {"error": str(error)})
        return
    worker = Worker(engine, workload)
    _answer(answers, {"ready": True})
    for line in commands:
        try:
            answer = worker.answer(json.loads(line))
        # A peer may not run on this machine. The reason is sent to the parent.
        except Exception as error:
            traceback.print_exception(error)
            answer = {"error": f"{type(error).__name__}: {error}"}
        _answer(answers, answer)
    engine.close()


def _answer(answers: TextIO, answer: dict[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    # The parent reads stdout, so nothing else may be written to it.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
