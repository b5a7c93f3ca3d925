"""Every op's checks and timings run, in small; and what an op does wrong is called wrong."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from benchmarks.ops import gpu_worker
from benchmarks.ops.gpu_list import all_units
from benchmarks.ops.gpu_units import Finding, Unit

STAGES = ("start", "compiled", "running")
UNITS = all_units(is_rehearsal=True)
OPS = sorted({unit.op for unit in UNITS if unit.kind != "machine"})


def first(kind: str, op: str, body: str = "xla") -> Unit:
    return next(u for u in UNITS if (u.kind, u.op, u.body) == (kind, op, body))


def run(units: list[Unit], folder: Path, *, is_serial: bool = True) -> list[dict]:
    file = folder / "events.jsonl"
    gpu_worker.do_units(units, gpu_worker.EventLog(file), run_seed=11, is_serial=is_serial)
    return [json.loads(line) for line in file.read_text().splitlines()]


def findings(event: dict) -> list[Finding]:
    return [Finding(**finding) for finding in event["findings"]]


@pytest.fixture(autouse=True)
def short_timings(monkeypatch) -> None:
    monkeypatch.setattr(gpu_worker, "UNIT_BUDGET_S", 0.05)


# The others' programs take the compiler longer.
QUICK_TIMINGS = ("block_gather", "kv_scatter", "merge_attention_states", "slot_mapping")


def assert_right(unit: Unit, events: list[dict]) -> None:
    (event,) = (e for e in events if e.get("unit") == unit.key and e["event"] not in STAGES)
    assert event["event"] == "done", event.get("reason")
    assert findings(event) and all(finding.is_right for finding in findings(event))
    if unit.kind == "time":
        assert min(event["samples_s"]) > 0


@pytest.mark.parametrize("op", OPS)
def test_the_ops_are_right(op: str, tmp_path: Path) -> None:
    check = first("check", op)
    assert_right(check, run([check], tmp_path))


@pytest.mark.parametrize(
    "op", [op if op in QUICK_TIMINGS else pytest.param(op, marks=pytest.mark.slow) for op in OPS]
)
def test_the_ops_are_timed_and_right(op: str, tmp_path: Path) -> None:
    timing = first("time", op)
    assert_right(timing, run([timing], tmp_path, is_serial=False))


def drop_last(x: jnp.ndarray) -> jnp.ndarray:
    """What a body leaves behind whose last row is never written."""
    return x.at[-1].set(jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0)


WRONG = {
    "paged_attention": lambda result: (drop_last(result[0]), result[1]),
    "cascade_attention": drop_last,
    "mla_decode": lambda out: out.at[0, 0].set(out[0, 1]),
    "kv_scatter": lambda caches: (caches[0].at[0, 0, 0, 0].set(0.0), caches[1]),
    "slot_mapping": lambda slots: slots + 1,
    "merge_attention_states": lambda state: (state[0] * 1.1, state[1]),
    "block_copy": lambda caches: (caches[0], drop_last(caches[1])),
    "block_gather": lambda blocks: (blocks[0], drop_last(blocks[1])),
    "block_scatter": lambda caches: (drop_last(caches[0]), caches[1]),
}


@pytest.mark.parametrize(
    "op",
    # Checked by the same code as paged_attention's timings, in a larger program.
    [pytest.param(op, marks=pytest.mark.slow) if op == "cascade_attention" else op for op in OPS],
)
def test_a_planted_fault_is_called_wrong(op: str, tmp_path: Path, monkeypatch) -> None:
    right = getattr(pallas_kernels, op)
    monkeypatch.setattr(pallas_kernels, op, lambda *args, **kw: WRONG[op](right(*args, **kw)))
    *_, event = run([first("check", op)], tmp_path)
    assert event["event"] == "done", event.get("reason")
    assert not all(finding.is_right for finding in findings(event))


def test_a_missing_body_is_absent_and_an_error_is_a_failure(tmp_path: Path, monkeypatch) -> None:
    check = first("check", "slot_mapping")

    def other_body(*args: object, **options: object) -> object:
        return right(*args, **{**options, "implementation": "mosaic_gpu_interpret_no"})

    right = pallas_kernels.slot_mapping
    monkeypatch.setattr(pallas_kernels, "slot_mapping", other_body)
    assert run([check], tmp_path)[-1]["event"] == "absent"
    monkeypatch.delattr(pallas_kernels, "slot_mapping")
    last = run([check], tmp_path)[-1]
    assert last["event"] == "failed" and "slot_mapping" in last["reason"]


def test_a_failing_unit_costs_no_other(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delattr(pallas_kernels, "block_copy")
    units = [first("check", "block_copy"), first("check", "slot_mapping")]
    events = run(units, tmp_path, is_serial=False)
    outcomes = {e["unit"]: e["event"] for e in events if e["event"] in ("done", "failed")}
    assert outcomes == {units[0].key: "failed", units[1].key: "done"}


def test_what_the_device_can_do_is_measured(tmp_path: Path) -> None:
    machine = [unit for unit in UNITS if unit.kind == "machine"]
    events = [event for event in run(machine, tmp_path) if event["event"] != "start"]
    assert [event["event"] for event in events] == ["done"] * len(machine)
    assert all(event["median_s"] > 0 for event in events)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_device_ends_the_process(is_lost: bool, tmp_path: Path, monkeypatch) -> None:
    def ends(code: int) -> None:
        raise SystemExit(code)

    def fails() -> None:
        raise ValueError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(gpu_worker, "_is_device_lost", lambda unit, reason: is_lost)
    monkeypatch.setattr(gpu_worker.os, "_exit", ends)
    broken = Unit(kind="check", op="op", case="broken", body="xla", program=fails)
    units = [broken, dataclasses.replace(broken, case="next")]
    if is_lost:
        with pytest.raises(SystemExit):
            run(units, tmp_path)
    else:
        run(units, tmp_path)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    failed = [e["unit"] for e in map(json.loads, lines) if e["event"] == "failed"]
    # The unit that lost it has no event: that is how the parent sees who it was.
    assert failed == ([] if is_lost else [unit.key for unit in units])


def test_a_device_that_answers_is_not_lost(monkeypatch) -> None:
    unit = first("check", "kv_scatter")
    assert not gpu_worker._is_device_lost(unit, "ValueError: CUDA error of no consequence")

    def raises(x: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(gpu_worker.jax, "block_until_ready", raises)
    assert gpu_worker._is_device_lost(unit, "ValueError: no")
    torch_unit = dataclasses.replace(unit, body="torch sdpa")
    assert gpu_worker._is_device_lost(torch_unit, "AcceleratorError: CUDA error: illegal access")
    assert not gpu_worker._is_device_lost(torch_unit, "OutOfMemoryError: CUDA out of memory")


def test_calls_of_a_timed_merge_cannot_be_fused_into_one() -> None:
    """Beside each other they were one kernel, which read the inputs once for all of them."""
    unit = first("time", "merge_attention_states")
    program = unit.program()
    state, inputs = program.make(0)
    step = jax.jit(program.step).lower(jnp.asarray(0, jnp.int32), state, inputs)
    assert program.calls_per_step > 1
    assert step.as_text().count("optimization_barrier") == program.calls_per_step
