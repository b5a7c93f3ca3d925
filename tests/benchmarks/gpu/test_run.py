"""The whole command in small: processes, rows, report; and without a GPU."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import run
from benchmarks.gpu.run import GpuOptions, run_gpu
from benchmarks.gpu.units import Group, all_groups, all_units


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(run, "all_groups", lambda **options: [Group(units=(), limit_s=1)])
    assert run_gpu(GpuOptions(out=tmp_path / "rows.jsonl", folder=tmp_path)) == 2
    assert "no GPU: got the platform None" in capsys.readouterr().out


def test_a_process_measures_the_machine(tmp_path: Path, capsys, monkeypatch):
    (machine, *_) = all_groups(is_rehearsal=True)
    monkeypatch.setattr(run, "all_groups", lambda **options: [machine])
    out = tmp_path / "rows.jsonl"
    options = GpuOptions(out=out, is_rehearsal=True, folder=tmp_path / "logs", commit="abc")
    assert run_gpu(options) == 0, capsys.readouterr().out
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["metric"] == "copy_gb_per_s" and row["median"] > 0 and row["commit"] == "abc"
    report = out.with_suffix(".md").read_text()
    assert report.startswith("# Rehearsal with tiny models, no results")
    assert "GB/s" in report and report in capsys.readouterr().out


def test_time_that_is_over_is_said_of_every_unit(tmp_path: Path, capsys):
    out = tmp_path / "rows.jsonl"
    options = GpuOptions(out=out, is_rehearsal=True, folder=tmp_path / "logs", time_limit_s=1.0)
    assert run_gpu(options) == 0
    text = out.with_suffix(".md").read_text()
    assert text.count(": out of time") == len(all_groups(is_rehearsal=True))
    assert all(unit.case in text for unit in all_units(is_rehearsal=True))
    assert not out.exists()
    capsys.readouterr()


@pytest.mark.slow  # about a minute: a process an engine and model
def test_a_rehearsal_measures_everything(tmp_path: Path, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "rows.jsonl"
    options = GpuOptions(out=out, is_rehearsal=True, folder=tmp_path / "logs", commit="abc")
    assert run_gpu(options) == 0, capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["case"] for row in rows}) == len(all_units(is_rehearsal=True))
    report = out.with_suffix(".md").read_text()
    for title in ("Decode", "First token", "Output tokens/s", "Prompts", "Loading"):
        assert f"## {title}" in report
    assert "## What was not measured" not in report
