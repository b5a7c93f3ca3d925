"""One process of the benchmark: makes one subject, measures its units, writes each down at once.

Started by `benchmarks/ops/gpu_processes.py`, which reads what it writes: one JSON line an event.
"""

import argparse
import importlib
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.packages import PEER_PACKAGES, missing_packages, missing_text
from benchmarks.gpu.units import TRANSFORMERS, all_units, subject_of
from benchmarks.ops.gpu_units import AbsentError, Unit
from benchmarks.ops.gpu_worker import LOST_DEVICE_EXIT, EventLog, outcome_of


class Subjects:
    """Makes the subject of a unit once; where that failed, it is not tried again."""

    def __init__(self, *, is_rehearsal: bool) -> None:
        self._is_rehearsal = is_rehearsal
        self._made: dict[tuple[str, str], Any] = {}

    def get(self, unit: Unit) -> Any:
        missing = missing_packages(PEER_PACKAGES) if unit.body == TRANSFORMERS else []
        if missing:
            raise AbsentError(missing_text("the comparison with transformers", missing))
        path, arguments = subject_of(unit)
        key = (path, json.dumps(arguments))
        if key not in self._made:
            module, _, name = path.partition(":")
            try:
                make = getattr(importlib.import_module(module), name)
                self._made[key] = make(**arguments, is_rehearsal=self._is_rehearsal)
            except Exception as error:
                self._made[key] = error
        if isinstance(self._made[key], Exception):
            raise self._made[key]
        return self._made[key]


def do_units(units: list[Unit], log: EventLog, subjects: Subjects, *, run_seed: int) -> None:
    """Measures one unit after the other; what one raises is its result, and costs no other."""
    for unit in units:
        log.write("start", unit=unit.key)
        started = time.perf_counter()
        # All subjects get the same work.
        arguments = {**unit.options, **({} if unit.measure == "load" else {"seed": run_seed})}
        try:
            event, fields = "done", getattr(subjects.get(unit), unit.measure)(**arguments)
        except Exception as error:
            event, reason = outcome_of(error)
            fields = {"reason": reason}
            if event == "failed":
                traceback.print_exception(error)
        fields["took_s"] = round(time.perf_counter() - started, 2)
        if event == "failed" and _has_lost_device(fields["reason"]):
            # All that follows in this process would fail too: it dies of this unit instead.
            print(f"lost the device: {fields['reason']}", flush=True)
            os._exit(LOST_DEVICE_EXIT)
        log.write(event, unit=unit.key, seed=run_seed, **fields)


def _describe_device() -> dict[str, str]:
    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}


def _has_lost_device(reason: str) -> bool:
    """Whether a fault took the CUDA context with it, which no later call survives."""
    signs = ("CUDA_ERROR_ILLEGAL", "CUDA_ERROR_LAUNCH", "illegal memory access", "CUDA error")
    return any(sign in reason for sign in signs) and "out of memory" not in reason


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--units", type=Path, required=True, help="JSON list of the units' keys")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--serial", action="store_true", help="they always are")
    arguments = parser.parse_args()
    known = {unit.key: unit for unit in all_units(is_rehearsal=arguments.rehearse)}
    units = [known[key] for key in json.loads(arguments.units.read_text())]
    # Nothing is fetched: a machine may reach nobody, and would wait for an answer.
    os.environ["HF_HUB_OFFLINE"] = "1"
    log = EventLog(arguments.events)
    # Not beside torch, from whom it would take memory.
    if any(unit.kind == "machine" for unit in units):
        log.write("device", **_describe_device())
    do_units(units, log, Subjects(is_rehearsal=arguments.rehearse), run_seed=arguments.seed)


if __name__ == "__main__":
    main()
