"""Figures by hand, from results as the processes give them."""

import json

import pytest

from benchmarks.gpu.report import Findings, report, roofline_percent, rows_of
from benchmarks.gpu.units import PAXKV, TRANSFORMERS
from benchmarks.ops.gpu_processes import Result
from benchmarks.ops.gpu_units import Unit
from benchmarks.result_rows import append_rows

LLAMA = "llama-3.1-8b"


def result(case: str, body: str = PAXKV, *, kind="time", outcome="done", reason="", **fields):
    options = fields.pop("options", {})
    unit = Unit(kind=kind, op=LLAMA, case=case, body=body, options=options)
    return Result(unit=unit, outcome=outcome, fields=fields, reason=reason)


def findings(*results: Result) -> Findings:
    return Findings(results=results, device="H200", jax_version="0.11.2")


COPY = result("copy", "copy", kind="machine", figures={"copy_gb_per_s": [3900.0, 4000.0, 4100.0]})
# 12 GB + 4 GB at 4,000 GB/s take 4 ms.
DECODE = result(
    "decode, 64 requests",
    figures={"step_ms": [5.0, 8.0], "device_step_ms": [4.5], "tokens_per_s": [12_800.0, 8_000.0]},
    reads={"weight_bytes": 12e9, "kv_bytes": 4e9, "context_tokens": 700.0},
    options={"num_reqs": 64},
)
ENGINE = result("throughput, engine", figures={"tokens_per_s": [900.0, 1000.0, 1100.0]})
STEPS = result("throughput, steps alone", figures={"tokens_per_s": [1500.0]})
CONTINUOUS = result(
    "throughput, continuous batching", TRANSFORMERS, figures={"tokens_per_s": [400.0]}
)


def test_roofline_is_the_time_of_the_bytes_over_the_time_taken():
    assert roofline_percent(DECODE, findings(COPY, DECODE)) == pytest.approx([80.0, 50.0])


def test_no_share_without_a_bandwidth_of_the_same_run():
    assert roofline_percent(DECODE, findings(DECODE)) == []
    assert "roofline_percent" not in {row.metric for row in rows_of(DECODE, findings(DECODE), None)}


def test_every_figure_is_a_row_with_what_it_belongs_to(tmp_path):
    rows = rows_of(DECODE, findings(COPY, DECODE), "abc123")
    append_rows(rows, tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    by_metric = {line["metric"]: line for line in lines}
    assert set(by_metric) == {"step_ms", "device_step_ms", "tokens_per_s", "roofline_percent"}
    row = by_metric["roofline_percent"]
    assert row["median"] == pytest.approx(65.0) and row["measured_copy_gb_per_s"] == 4000.0
    assert row["commit"] == "abc123" and row["device"] == "H200" and row["engine"] == "paxkv"
    assert row["case"] == "model=llama-3.1-8b engine=paxkv what=decode, 64 requests"


def test_rows_can_be_read_by_the_report_of_all_benchmarks(tmp_path):
    report_of_all = pytest.importorskip("benchmarks.report")
    failed = result("throughput, engine", outcome="died", reason="no sign of life")
    for of_result in (ENGINE, failed):
        append_rows(rows_of(of_result, findings(), None), tmp_path / "rows.jsonl")
    (row,) = report_of_all.read_rows([tmp_path / "rows.jsonl"])
    assert row.median == 1000.0
    assert row.fields["engine"] == "paxkv" and row.fields["what"] == "throughput, engine"


def test_report_compares_with_transformers_and_says_what_was_wanted():
    text = report(findings(COPY, DECODE, ENGINE, STEPS, CONTINUOUS), seconds=12.0)
    assert "4,000 GB/s" in text
    assert "got 65.0 %, missed" in text
    assert "engine: got 2.50, met" in text and "steps alone: got 3.75, met" in text
    (line,) = [line for line in text.splitlines() if "transformers: continuous" in line]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["400", "2.50", "3.75"]


def test_device_is_idle_while_the_engine_takes_longer_than_the_device_alone():
    engine = result(
        "engine decode, 64 requests",
        figures={"step_ms": [5.0], "tokens_per_s": [1.0], "host_ms_per_step": [0.25]},
        options={"num_reqs": 64},
    )
    lines = report(findings(COPY, DECODE, engine), seconds=1.0).splitlines()
    line = lines[lines.index("## Decode by the engine") + 4]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        f"{LLAMA}, 64",
        "5.00",
        "1",
        "0.25",
        "10.0",
    ]


def test_nothing_is_said_of_what_was_not_measured():
    text = report(findings(result("load", outcome="skipped", reason="out of time")), seconds=1.0)
    assert "Copy bandwidth, bytes read and written: not measured" in text
    assert f"- skipped: {LLAMA}, paxkv (load): out of time" in text
    assert "## Wanted" not in text and "wanted" not in text and "## Decode" not in text


def test_what_has_one_reason_is_one_line():
    results = [result(case, outcome="absent", reason="needs pyzmq") for case in ("a", "b")]
    text = report(findings(*results, result("c", outcome="died", reason="fault")), seconds=1.0)
    assert f"- absent: {LLAMA}, paxkv (a; b): needs pyzmq" in text
    assert f"- DIED: {LLAMA}, paxkv (c): fault" in text
