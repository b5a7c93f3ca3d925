"""A report shows every figure once, and draws bars where there is something to see."""

import json
import math

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.report import main, read_rows
from benchmarks.result_rows import ResultRow


def row(benchmark: str, case: str, metric: str, median: float, **others: object) -> dict:
    fields = {"benchmark": benchmark, "case": case, "metric": metric, "device": "a processor"}
    values = [0.9 * median, median, 1.2 * median]
    return ResultRow(**fields, values=values, details={"commit": "abc"}).as_dict() | others


def write(file, rows):
    file.write_text("".join(json.dumps(fields) + "\n" for fields in rows))
    return file


def test_report_has_every_row_and_one_plot_of_all_engines(tmp_path) -> None:
    # One case has nothing to draw, but is in the table.
    rows = [row("benchmarks.host", "block_size=16", "preemptions", 0.0)]
    for workload in ("mixed", "skewed"):
        for engine, median in (("paxkv", 900.0), ("static-8", 300.0)):
            case = f"model=tiny workload={workload} threads=1 engine={engine}"
            rows.append(row("benchmarks.compare_torch", case, "tokens_per_cpu_s", median))
        rows.append(row("benchmarks.compare_torch", case, "paxkv_times_per_cpu_s", 3.0))
    assert main([str(write(tmp_path / "rows.jsonl", rows)), "--out", str(tmp_path / "out")]) == 0
    (plot,) = (tmp_path / "out").glob("*.png")
    text = (tmp_path / "out" / "report.md").read_text()
    assert plot.read_bytes().startswith(b"\x89PNG") and f"({plot.name})" in text
    assert sum("| a processor |" in line for line in text.splitlines()) == len(rows)


def test_last_row_of_a_case_and_device_counts_and_must_be_a_number(tmp_path) -> None:
    rows = [row("b", "c", "m", 1.0, device=device) for device in ("cpu", "gpu")]
    absent = row("b", "c", "none", 1.0, num_repetitions=0)
    del absent["median"]
    rows += [rows[0] | {"median": 1.1}, row("b", "d", "m", 1.0, rehearsal=True), absent]
    found = read_rows([write(tmp_path / "rows.jsonl", rows)])
    assert [(r.case, r.device, r.median) for r in found] == [("c", "cpu", 1.1), ("c", "gpu", 1.0)]
    file = write(tmp_path / "rows.jsonl", [rows[0], row("b", "c", "m", math.nan)])
    with pytest.raises(BenchmarkError, match=r"rows\.jsonl:2 is not a result row: .* is nan"):
        read_rows([file])
