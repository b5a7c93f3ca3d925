"""A unit that fails costs no other; a lost device ends the process without a result."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks.units import worker
from benchmarks.units.unit import AbsentError, Measured, Unit
from benchmarks.units.worker import LOST_DEVICE_EXIT, EventLog, do_units


def raising(error: Exception):
    def measure(seed: int) -> Measured:
        raise error

    return measure


def unit(case: str, measure, body: str = "xla") -> Unit:
    return Unit(kind="check", op="op", case=case, body=body, measure=measure)


def run(units: list[Unit], folder: Path) -> list[dict]:
    file = folder / "events.jsonl"
    do_units(units, EventLog(file), run_seed=3)
    events = [json.loads(line) for line in file.read_text().splitlines()]
    return [event for event in events if event["event"] != "start"]


def test_each_unit_has_its_own_result(tmp_path) -> None:
    units = [
        unit("first", lambda seed: Measured(figures={"seed": [seed]})),
        unit("broken", raising(ValueError("wrong length"))),
        unit("absent", raising(AbsentError("needs torch"))),
        unit("no body", raising(ValueError("op has no such implementation: got 'x'"))),
        unit("last", lambda seed: Measured(figures={})),
    ]
    events = run(units, tmp_path)
    assert [event["event"] for event in events] == ["done", "failed", "absent", "absent", "done"]
    assert events[0]["figures"] == {"seed": [units[0].seed(3)]}
    assert "ValueError: wrong length" in events[1]["reason"]


def test_lost_device_ends_the_process_before_the_unit_has_a_result(tmp_path, monkeypatch) -> None:
    def leave(code: int) -> None:
        assert code == LOST_DEVICE_EXIT
        raise SystemExit(code)

    monkeypatch.setattr(worker.os, "_exit", leave)
    monkeypatch.setattr(worker, "is_device_lost", lambda unit, reason: True)
    with pytest.raises(SystemExit):
        run(
            [unit("lost", raising(ValueError("x"))), unit("next", raising(ValueError("y")))],
            tmp_path,
        )
    assert '"failed"' not in (tmp_path / "events.jsonl").read_text()


def test_device_that_answers_is_not_lost(monkeypatch) -> None:
    ours, torch = (unit("a", None, body) for body in ("xla", "torch sdpa"))
    assert not worker.is_device_lost(ours, "ValueError: CUDA error of no consequence")
    assert worker.is_device_lost(torch, "AcceleratorError: CUDA error: illegal access")

    def raises(x: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(worker.jax, "block_until_ready", raises)
    assert worker.is_device_lost(ours, "ValueError: no")
