"""One process of the GPU benchmark: does some units and writes down each result at once.

Started by `gpu_processes.py`, which reads what it writes: one JSON line an event. What kills this
process (a fault on the device, a hang) costs the unit at work; the rest goes on in another one.
"""

import argparse
import functools
import importlib
import json
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ops.gpu_compile import AheadCompiler
from benchmarks.ops.gpu_list import all_units
from benchmarks.ops.gpu_timing import compile_unit, precision_of, time_program
from benchmarks.ops.gpu_units import AbsentError, Finding, Program, Unit

NUM_COMPILING = 6
UNIT_BUDGET_S = 1.5
LOST_DEVICE_EXIT = 3
# Poison that goes back to the allocator before each unit: buffers inside a program hold it then.
NUM_POISON_BUFFERS = 8
POISON_BYTES = 2**26
# What `dispatch.run_op` says of a body that an op does not have, or not for these arguments; and
# what JAX says without cuDNN.
_NOT_THERE = ("has no such implementation", "cannot do this call", "cuDNN not found")


class EventLog:
    """Appends events to a file, each on the disk before the next thing is done."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "at": round(time.time(), 3), **fields}
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")
            out.flush()
            os.fsync(out.fileno())


def last_lines(error: BaseException, num_lines: int = 3) -> str:
    """The end of an exception's text, and where in our code it came from."""
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "pallas_kernels" in f.filename or "benchmarks" in f.filename]
    where = f" [{Path(ours[-1].filename).name}:{ours[-1].lineno}]" if ours else ""
    return f"{type(error).__name__}: {' / '.join(text[:1] + text[1:][-num_lines:])[:700]}{where}"


def outcome_of(error: BaseException) -> tuple[str, str]:
    """("absent" or "failed", why)."""
    if isinstance(error, AbsentError | ModuleNotFoundError):
        return "absent", str(error)
    if any(text in str(error) for text in _NOT_THERE):
        return "absent", " ".join(str(error).split())[:400]
    return "failed", last_lines(error)


def do_units(units: list[Unit], log: EventLog, *, run_seed: int, is_serial: bool) -> None:
    """Compiles all units side by side, then runs one after another.

    Args:
        is_serial: Compiles each only when its turn comes, so that a crash of the compiler is known
            for whose it is.
    """
    with ThreadPoolExecutor(1 if is_serial else NUM_COMPILING) as pool:
        compiling: dict[str, Future] = {}
        if not is_serial:
            compiling = {u.key: pool.submit(_compile, u) for u in units if u.program is not None}
            for unit in units:
                if unit.key in compiling:
                    compiling[unit.key].exception()
                    log.write("compiled", unit=unit.key)
        for unit in units:
            log.write("start", unit=unit.key)
            started = time.perf_counter()
            do = functools.partial(_do_unit, unit, compiling.pop(unit.key, None), log, run_seed)
            event, fields = _attempt(do)
            fields["took_s"] = round(time.perf_counter() - started, 2)
            if event == "failed" and _is_device_lost(unit, fields["reason"]):
                # All that follows in this process would fail too: it dies of this unit instead.
                print(f"lost the device: {fields['reason']}", flush=True)
                os._exit(LOST_DEVICE_EXIT)
            log.write(event, unit=unit.key, seed=unit.seed(run_seed), **fields)


def _do_unit(unit: Unit, compiling: Future | None, log: EventLog, run_seed: int) -> dict[str, Any]:
    if unit.measure is not None:
        return _measure(unit, unit.seed(run_seed))
    program, compiled = _compiled(unit, compiling)
    log.write("running", unit=unit.key)
    return _run(unit, program, compiled, unit.seed(run_seed))


def compile_units(units: list[Unit], log: EventLog, target_config: Path) -> None:
    """Compiles units for a described device, and nothing more."""
    compiler = AheadCompiler(target_config)
    for unit in units:
        log.write("start", unit=unit.key)
        started = time.perf_counter()
        event, fields = _attempt(lambda unit=unit: compiler.compile(unit))
        fields["took_s"] = round(time.perf_counter() - started, 2)
        log.write(event, unit=unit.key, **fields)


def _attempt(do: Callable[[], dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """An event and its fields: whatever a unit raises is its result, and costs no other unit."""
    try:
        return "done", do()
    except Exception as error:
        event, reason = outcome_of(error)
        if event == "failed":
            traceback.print_exception(error)
        return event, {"reason": reason}


def _is_device_lost(unit: Unit, reason: str) -> bool:
    """Whether a fault on the device took the CUDA context with it, which no later call survives."""
    if unit.body.startswith("torch"):  # whose process has no JAX device
        return "CUDA error" in reason
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _compile(unit: Unit) -> tuple[Program, jax.stages.Compiled]:
    program = unit.program()
    return program, compile_unit(unit, program, unit.num_steps)


def _compiled(unit: Unit, compiling: Future | None) -> tuple[Program, jax.stages.Compiled]:
    """What was compiled beside others; again, alone, if that failed: the fault may be the crowd."""
    if compiling is not None:
        error = compiling.exception()
        if error is None:
            return compiling.result()
        if outcome_of(error)[0] == "absent":
            raise error
    return _compile(unit)


def _measure(unit: Unit, seed: int) -> dict[str, Any]:
    module, function = unit.measure.split(":")
    measure = getattr(importlib.import_module(module), function)
    return measure(**unit.options, seed=seed, budget_s=UNIT_BUDGET_S)


def _run(unit: Unit, program: Program, compiled: jax.stages.Compiled, seed: int) -> dict[str, Any]:
    """Runs once and verifies that; times it then, if it is a timing."""
    _poison_free_memory()
    state, inputs = jax.block_until_ready(jax.tree.map(jnp.asarray, program.make(seed)))
    with precision_of(unit):
        state = compiled(jnp.asarray(0, jnp.int32), state, inputs)
    findings = program.verify(jax.block_until_ready(state), inputs, unit.num_steps - 1)
    fields: dict[str, Any] = {"findings": [_as_dict(finding) for finding in findings]}
    if unit.kind == "check":
        return fields
    samples = time_program(
        compiled,
        state,
        inputs,
        num_steps=unit.num_steps,
        calls_per_step=program.calls_per_step,
        budget_s=UNIT_BUDGET_S,
    )
    return {**fields, "samples_s": list(samples.seconds), "method": samples.method}


def _poison_free_memory() -> None:
    num_bytes = POISON_BYTES if jax.default_backend() == "gpu" else 2**16
    buffers = [jnp.full((num_bytes // 4,), jnp.nan, jnp.float32) for _ in range(NUM_POISON_BUFFERS)]
    jax.block_until_ready(buffers)


def _as_dict(finding: Finding) -> dict[str, Any]:
    return {"what": finding.what, "error": finding.error, "limit": finding.limit}


def _describe_device() -> dict[str, Any]:
    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--units", type=Path, required=True, help="JSON list of the units' keys")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--serial", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile-for", type=Path, help="description of a GPU; runs nothing")
    arguments = parser.parse_args()
    keys = json.loads(arguments.units.read_text())
    listed = all_units(is_rehearsal=arguments.rehearse, is_tuning=arguments.tune)
    known = {unit.key: unit for unit in listed}
    units = [known[key] for key in keys]
    log = EventLog(arguments.events)
    if arguments.compile_for is not None:
        compile_units(units, log, arguments.compile_for)
        return
    if any(unit.program is not None or unit.kind == "machine" for unit in units):
        log.write("device", **_describe_device())
    do_units(units, log, run_seed=arguments.seed, is_serial=arguments.serial)


if __name__ == "__main__":
    main()
