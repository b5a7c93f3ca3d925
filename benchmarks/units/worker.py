"""The process of one group of units: runs them in order and writes an event after each.

`runner.py` starts this process and reads its events, one JSON object per line. A fault on the
device or a hang costs the unit that runs; the runner starts another process for the other units.
"""

import argparse
import importlib
import json
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.units.unit import AbsentError, Measured, Unit, measured_as_json

LOST_DEVICE_EXIT = 3
# Messages of `dispatch.run_op` for a body that an op lacks or that cannot take the arguments, and
# of JAX without cuDNN.
_NOT_THERE = (
    "has no such implementation",
    "cannot do this call",
    "cuDNN not found",
    "cuDNN is not detected",
)


class EventLog:
    """Appends events to a file and syncs each one to the disk."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, event: str, **fields: Any) -> None:
        with self._file.open("a") as out:
            out.write(json.dumps({"event": event, **fields}) + "\n")
            out.flush()
            os.fsync(out.fileno())


def do_units(units: Sequence[Unit], log: EventLog, *, run_seed: int) -> None:
    """Runs units in order; an exception is the unit's result and does not stop the others."""
    for unit in units:
        log.write("start", unit=unit.key)
        started = time.perf_counter()
        fields: dict[str, Any]
        try:
            event, fields = "done", measured_as_json(unit.measure(unit.seed(run_seed)))
        except Exception as error:
            event, reason = outcome_of(error)
            fields = {"reason": reason}
            if event == "failed":
                traceback.print_exception(error)
                if is_device_lost(unit, reason):
                    # Every later unit of this process would fail too. Without a result for this
                    # unit, the runner sees which one lost the device.
                    print(f"lost the device: {reason}", flush=True)
                    os._exit(LOST_DEVICE_EXIT)
        took_s = round(time.perf_counter() - started, 2)
        log.write(event, unit=unit.key, seed=unit.seed(run_seed), took_s=took_s, **fields)


def outcome_of(error: BaseException) -> tuple[str, str]:
    """("absent" or "failed", reason)."""
    if isinstance(error, AbsentError | ModuleNotFoundError):
        return "absent", str(error)
    text = " ".join(str(error).split())
    if any(sign in text for sign in _NOT_THERE):
        return "absent", text[:400]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "pallas_kernels" in f.filename or "benchmarks" in f.filename]
    where = f" [{Path(ours[-1].filename).name}:{ours[-1].lineno}]" if ours else ""
    return "failed", f"{type(error).__name__}: {text[-600:]}{where}"


def is_device_lost(unit: Unit, reason: str) -> bool:
    """True after a fault that took the CUDA context with it."""
    if unit.body.startswith(("torch", "transformers")):  # JAX must take no memory beside torch
        return "CUDA error" in reason
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except jax.errors.JaxRuntimeError:
        return True
    return False


def measure_device(_: int) -> Measured:
    """The `measure` of every run's first unit: which device JAX sees."""
    device = jax.devices()[0]
    described = {"device": device.device_kind, "platform": device.platform}
    return Measured(figures={}, details={**described, "jax": jax.__version__})


DEVICE_UNIT = Unit(kind="machine", op="device", case="name", body="jax", measure=measure_device)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--listed-by", required=True, help="MODULE:FUNCTION that lists all units")
    parser.add_argument("--units", type=Path, required=True, help="JSON list of the units' keys")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args(argv)
    # The machine may have no network; the hub would wait for it.
    os.environ["HF_HUB_OFFLINE"] = "1"
    module, _, function = arguments.listed_by.partition(":")
    listed = getattr(importlib.import_module(module), function)(is_rehearsal=arguments.rehearse)
    known = {unit.key: unit for unit in (DEVICE_UNIT, *listed)}
    units = [known[key] for key in json.loads(arguments.units.read_text())]
    do_units(units, EventLog(arguments.events), run_seed=arguments.seed)


if __name__ == "__main__":
    main()
