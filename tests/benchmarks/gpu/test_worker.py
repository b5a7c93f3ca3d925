"""A unit that fails costs no other, and a subject that cannot be made is tried once."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.gpu import worker
from benchmarks.gpu.worker import Subjects, do_units
from benchmarks.ops.gpu_units import AbsentError, Unit
from benchmarks.ops.gpu_worker import LOST_DEVICE_EXIT, EventLog


class FakeSubject:
    """Measures what it is told to."""

    num_made = 0

    def __init__(self, *, is_rehearsal: bool, is_broken: bool = False) -> None:
        assert is_rehearsal
        FakeSubject.num_made += 1
        if is_broken:
            raise RuntimeError("no memory")

    def load(self):
        return {"figures": {"load_s": [1.0]}}

    def seeded(self, *, seed: int, factor: int):
        return {"figures": {"value": [seed * factor]}}

    def absent(self, *, seed: int):
        raise AbsentError("needs pyzmq")

    def broken(self, *, seed: int):
        raise ValueError("wrong length")

    def lost(self, *, seed: int):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def unit(measure: str, **options) -> Unit:
    return Unit(
        kind="time", op="model", case=measure, body="paxkv", measure=measure, options=options
    )


def run(units: list[Unit], tmp_path: Path, monkeypatch, **arguments) -> list[dict]:
    path = f"{__name__}:FakeSubject"
    monkeypatch.setattr(worker, "subject_of", lambda unit: (path, arguments))
    module = type("module", (), {"FakeSubject": FakeSubject})
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    FakeSubject.num_made = 0
    log = EventLog(tmp_path / "events.jsonl")
    do_units(units, log, Subjects(is_rehearsal=True), run_seed=3)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] != "start"]


def test_each_unit_has_its_own_result(tmp_path, monkeypatch):
    units = [unit("load"), unit("broken"), unit("absent"), unit("seeded", factor=2)]
    events = run(units, tmp_path, monkeypatch)
    assert [event["event"] for event in events] == ["done", "failed", "absent", "done"]
    assert "ValueError: wrong length" in events[1]["reason"]
    assert events[2]["reason"] == "needs pyzmq"
    assert events[3]["figures"] == {"value": [6]} and events[3]["seed"] == 3
    assert FakeSubject.num_made == 1


def test_subject_that_cannot_be_made_is_tried_once(tmp_path, monkeypatch):
    events = run([unit("load"), unit("absent")], tmp_path, monkeypatch, is_broken=True)
    assert [event["event"] for event in events] == ["failed", "failed"]
    assert all("no memory" in event["reason"] for event in events)
    assert FakeSubject.num_made == 1


def test_peers_that_are_not_installed_are_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "missing_packages", lambda names: ["torch"])
    peer = dataclasses.replace(unit("load"), body="transformers")
    events = run([peer, unit("load")], tmp_path, monkeypatch)
    assert [event["event"] for event in events] == ["absent", "done"]
    assert events[0]["reason"].startswith("the comparison with transformers needs torch")


def test_process_dies_of_the_unit_that_loses_the_device(tmp_path, monkeypatch):
    exits = []

    def leave(code: int) -> None:
        exits.append(code)
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(SystemExit):
        run([unit("lost"), unit("load")], tmp_path, monkeypatch)
    assert exits == [LOST_DEVICE_EXIT]
    events = (tmp_path / "events.jsonl").read_text()
    assert '"done"' not in events and '"failed"' not in events
