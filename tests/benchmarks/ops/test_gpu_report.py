"""Figures, verdicts and rows, from results whose figures one can reckon by hand."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.ops import gpu_report
from benchmarks.ops.gpu_attention_speed import MIXED_CASE, MIXED_PARTS
from benchmarks.ops.gpu_processes import Result
from benchmarks.ops.gpu_report import Ceilings
from benchmarks.ops.gpu_units import Unit, Wanted
from benchmarks.result_rows import append_rows

CEILINGS = Ceilings(copy_bytes_per_s=4e12, flops_per_s=800e12)


def timing(seconds: float, *, error: float = 1e-3, case: str = "case", **fields) -> Result:
    unit = Unit(
        **{"kind": "time", "op": "paged_attention", "case": case, "body": "mosaic_gpu"} | fields
    )
    return Result(
        unit=unit,
        outcome="done",
        fields={
            "samples_s": [seconds, seconds, 2 * seconds],
            "method": "by hand",
            "findings": [{"what": "out", "error": error, "limit": 1e-2}],
            "seed": 7,
        },
    )


def check(error: float, outcome: str = "done", reason: str = "") -> Result:
    unit = Unit(kind="check", op="op", case=f"{error} {outcome}", body="xla")
    findings = [{"what": "out", "error": error, "limit": 1e-2}] if outcome == "done" else []
    return Result(unit=unit, outcome=outcome, fields={"findings": findings}, reason=reason)


def test_rates_and_shares_follow_from_the_median() -> None:
    # 2e9 bytes in 1 ms: 2 TB/s, half of the copy; 0.6e12 operations: 600 TFLOP/s, 3/4 of it.
    figures = gpu_report.figures_of(
        timing(1e-3, num_bytes=2 * 10**9, num_flops=6 * 10**11), CEILINGS
    )
    assert figures.median_s == 1e-3
    assert figures.bytes_per_s == pytest.approx(2e12)
    assert (figures.copy_share, figures.matrix_share) == (pytest.approx(0.5), pytest.approx(0.75))
    assert figures.floor_share == pytest.approx(0.75)


@pytest.mark.parametrize(
    "wanted, verdict",
    [
        (Wanted(figure="copy_share", values=(0.45,)), "met"),
        (Wanted(figure="copy_share", values=(0.55,)), "missed"),
        (Wanted(figure="floor_share", values=(0.7,)), "met"),
        (Wanted(figure="tflops", values=(450.0, 650.0)), "met missed"),
        (Wanted(figure="us", values=(1001.0,)), "met"),
        (Wanted(figure="us", values=(999.0,)), "missed"),
    ],
)
def test_verdicts_are_of_the_wanted_figure(wanted: Wanted, verdict: str) -> None:
    result = timing(1e-3, num_bytes=2 * 10**9, num_flops=6 * 10**11, wanted=wanted)
    assert gpu_report.figures_of(result, CEILINGS).verdict == verdict
    line = gpu_report.table_lines([result], CEILINGS)[-1]
    assert line.endswith(f"| {verdict} |") and "1.000" in line
    if wanted.figure == "copy_share":
        without = gpu_report.figures_of(result, Ceilings())
        assert without.verdict == "no ceiling measured"


def test_ceilings_are_the_best_of_the_run() -> None:
    def machine(body: str, seconds: float, **work: int) -> Result:
        unit = Unit(kind="machine", op=body, case="", body=body, **work)
        return Result(unit=unit, outcome="done", fields={"samples_s": [seconds]})

    results = [
        machine("copy", 2e-3, num_bytes=8 * 10**9),
        machine("add_one", 1e-3, num_bytes=8 * 10**9),
        machine("read", 1e-4, num_bytes=4 * 10**9),  # reading alone is no copy
        machine("matmul", 1e-3, num_flops=10**12),
    ]
    ceilings = gpu_report.ceilings_of(results)
    assert ceilings.copy_bytes_per_s == pytest.approx(8e12)
    assert ceilings.flops_per_s == pytest.approx(1e15)
    assert gpu_report.ceilings_of([]) == Ceilings()
    assert "read (): 40,000 GB/s" in gpu_report.machine_lines(results)


def test_a_fast_wrong_result_is_called_wrong() -> None:
    result = timing(1e-3, error=math.nan, num_bytes=1)
    assert gpu_report.is_wrong(result)
    assert "WRONG" in gpu_report.table_lines([result], CEILINGS)[-1]
    assert gpu_report.row_of(result, CEILINGS, "gpu", None).as_dict()["is_right"] is False


def test_less_work_than_was_counted_is_noticed() -> None:
    # 8e9 bytes in 1 ms would be twice the copy; of 8e6 a cache may hold all.
    fast = timing(1e-3, num_bytes=8 * 10**9)
    assert "TOO FAST" in gpu_report.table_lines([fast], CEILINGS)[-1]
    cached = timing(1e-6, num_bytes=8 * 10**6)
    assert "TOO FAST" not in gpu_report.table_lines([cached], CEILINGS)[-1]


def test_checks_are_counted_and_failures_named() -> None:
    results = [
        check(1e-3),
        check(5e-3),
        check(math.nan),
        check(0.5),
        check(0.0, "died", "its process ended with -6; illegal address"),
        check(0.0, "absent", "no body"),
        check(0.0, "skipped", "out of time"),
    ]
    (line,) = gpu_report.check_lines(results)
    assert line.startswith("op xla: 2 of 7 right, 2 WRONG, 1 DIED, 1 absent, 1 skipped")
    lines = gpu_report.failure_lines(results)
    assert sum(line.startswith("WRONG") for line in lines) == 2
    assert any("illegal address" in line for line in lines)
    assert any(line.startswith("skipped: 1 x") for line in lines)


def test_mixed_batch_is_held_against_its_parts() -> None:
    parts = [timing(1e-3, case=MIXED_PARTS[0]), timing(2e-3, case=MIXED_PARTS[1])]
    (line,) = gpu_report.mixed_lines([timing(3.3e-3, case=MIXED_CASE), *parts])
    assert "1.10 x" in line and line.endswith("met)")
    (line,) = gpu_report.mixed_lines([timing(3.6e-3, case=MIXED_CASE), *parts])
    assert "1.20 x" in line and "missed" in line
    assert gpu_report.mixed_lines(parts) == []


def test_every_result_is_a_line_of_strict_json(tmp_path: Path) -> None:
    results = [timing(1e-3, num_bytes=10**9), check(1e-3), check(math.nan), check(0.0, "died", "x")]
    rows = [gpu_report.row_of(result, CEILINGS, "a GPU", "abc1234") for result in results]
    append_rows(rows, tmp_path / "rows.jsonl")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    timed, checked, wrong, died = (json.loads(line, parse_constant=refuse) for line in lines)
    assert (timed["metric"], timed["median"], timed["device"]) == ("call_ms", 1.0, "a GPU")
    assert timed["gb_per_s"] == pytest.approx(1000) and timed["commit"] == "abc1234"
    assert timed["share_of_copy"] == pytest.approx(0.25) and timed["seed"] == 7
    assert checked["metric"] == "relative_error" and checked["median"] == 1e-3
    assert wrong["is_right"] is False and "median" not in wrong
    assert died["outcome"] == "died" and died["reason"] == "x"
