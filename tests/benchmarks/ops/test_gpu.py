"""The whole command in small: every process, the file of rows, the report."""

import json
from pathlib import Path

from benchmarks.ops.gpu import GpuOptions, run_gpu


def test_a_rehearsal_writes_rows_and_a_report(tmp_path: Path, capsys) -> None:
    out = tmp_path / "rows.jsonl"
    options = GpuOptions(
        out=out,
        only="slot_mapping",
        is_quick=True,
        is_rehearsal=True,
        folder=tmp_path / "logs",
        commit="abc",
    )
    assert run_gpu(options) == 0, capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["metric"] for row in rows} == {"call_ms", "relative_error"}
    timed = next(row for row in rows if row["op"] == "slot_mapping" and "gb_per_s" in row)
    assert timed["measured_copy_gb_per_s"] > 0 and timed["share_of_copy"] > 0
    report = out.with_suffix(".md").read_text()
    assert "| slot_mapping | 8,192 tokens of 32 requests | xla |" in report
    assert report in capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.ops.gpu.all_units", lambda **options: [])
    assert run_gpu(GpuOptions(out=tmp_path / "rows.jsonl", folder=tmp_path)) == 2
    assert "no GPU: got the platform None" in capsys.readouterr().out
