"""Rates and shares follow from the rows; what went wrong is named."""

from benchmarks.ops.gpu_report import report
from benchmarks.units.run import unit_rows
from benchmarks.units.unit import Finding, Measured, Result, Unit


def result(kind: str, case: str, metric="none", *values, error=0.0, **details) -> Result:
    unit = Unit(kind=kind, op="op", case=case, body="xla", measure=lambda seed: None)
    finding = Finding(what="out", error=error, limit=1e-2)
    measured = Measured(figures={metric: values}, findings=[finding], details=details)
    return Result(unit=unit, outcome="done", measured=measured)


def lines_of(*results: Result) -> list[list[str]]:
    rows = [row.as_dict() for of_unit in results for row in unit_rows(of_unit, "b", "d", {})]
    text = report(rows, "H200")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_rates_are_of_the_median_and_shares_of_the_device() -> None:
    # 2e9 bytes and 0.6e12 operations in 1 ms: 2 TB/s, 600 TFLOP/s.
    work = {"num_bytes": 2 * 10**9, "num_flops": 6 * 10**11}
    lines = lines_of(
        result("machine", "copy", "copy_gb_per_s", 4000.0),
        result("machine", "matmul", "matmul_tflop_per_s", 800.0),
        result("time", "case", "call_ms", 1.0, 1.0, 2.0, **work),
        result("time", "fast", "call_ms", 0.1, **work),
    )
    assert ["op, case, xla", "1.0000", "2,000", "600", "50", "75", ""] in lines
    assert [line[-1] for line in lines if line[0] == "op, fast, xla"] == ["TOO FAST TO BE TRUE"]


def test_checks_are_counted_and_problems_named() -> None:
    lines = lines_of(
        result("check", "a", "relative_error", 1e-3, error=1e-3),
        result("check", "b", "relative_error", 0.5, error=0.5),
        Result(unit=result("check", "c").unit, outcome="died", reason="illegal address"),
        Result(unit=result("check", "d").unit, outcome="absent", reason="no such body"),
        # It has no time.
        result("time", "e", error=0.25),
    )
    assert ["op", "xla", "1 of 4", "1 wrong, 1 died, 1 absent", "5.0e-01"] in lines
    text = "\n".join(" ".join(line) for line in lines)
    assert "WRONG check op b xla: out 0.5 (limit 1e-02)" in text
    assert "WRONG time op e xla: out 0.25 (limit 1e-02)" in text
    assert "DIED" in text and "illegal address" in text
    assert "absent: 1 units of xla: no such body" in text
