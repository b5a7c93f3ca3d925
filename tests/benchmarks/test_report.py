"""A report shows every figure once, and draws bars where there is something to see."""

import json

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.report import main, read_rows


def row(benchmark: str, case: str, metric: str, median: float, **others: object) -> dict:
    fields = {"date": "2026-01-02", "benchmark": benchmark, "case": case, "metric": metric}
    fields |= {"median": median, "min": median * 0.9, "max": median * 1.2, "num_repetitions": 3}
    fields |= {"device": "a processor", "commit": "abc1234", "command": "python -m x"}
    return fields | others


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


@pytest.mark.parametrize(
    "line",
    [
        '{"median": 1}',
        "{",
        "[1]",
        json.dumps(row("b", "c", "m", 1.0) | {"median": "1"}),
        json.dumps(row("b", "c", "m", float("nan"))),
        json.dumps(row("b", "c", "m", 1.0, min=2.0)),
        json.dumps(row("b", None, "m", 1.0)),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row('b', 'c', 'm', 1.0))}\n{line}\n")
    with pytest.raises(BenchmarkError, match=r"rows\.jsonl:2 is no result row"):
        read_rows([file])


def test_last_row_of_a_case_and_device_counts_if_it_has_a_figure(tmp_path) -> None:
    rows = [row("b", "c", "m", 1.0, device=device) for device in ("cpu", "gpu")]
    absent = row("b", "c", "none", 1.0, num_repetitions=0)
    del absent["median"]
    rows += [rows[0] | {"median": 1.1}, row("b", "d", "m", 1.0, rehearsal=True), absent]
    found = read_rows([write(tmp_path / "rows.jsonl", rows)])
    assert [(r.case, r.device, r.median) for r in found] == [("c", "cpu", 1.1), ("c", "gpu", 1.0)]
