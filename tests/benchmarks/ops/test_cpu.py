"""The CPU half at a tiny size: it checks before it times, and names wrong results."""

import json

from benchmarks.ops import cpu
from benchmarks.ops.cpu import CpuSizes, run_sizes
from benchmarks.ops.cpu_attention import CpuBatch
from benchmarks.ops.cpu_experts import ExpertSizes
from benchmarks.ops.cpu_timing import sample_in_turn
from benchmarks.ops.cpu_torch_sdpa import HAS_TORCH

SIZES = {"num_samples": 2, "block_sizes": (16,), "bytes_in_turn": 1, "read_buffer_bytes": 4 << 20}
TINY = CpuSizes(
    **SIZES,
    scatter_bytes=(4 << 20, 8 << 20),
    experts=ExpertSizes(num_rows=8, num_hit=2, in_features=16, out_features=24),
    num_experts=(2, 6),
)
DECODE = CpuBatch(name="decodes", requests=((1, 40), (1, 3), (1, 40)))
MIXED = CpuBatch(name="mixed", requests=((20, 50), (1, 30)))


def test_every_figure_becomes_a_row(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert run_sizes(TINY, (DECODE,), out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    metrics = {(row["case"], row["metric"]) for row in rows}
    assert len(metrics) == len(rows)
    case = "decodes, block 16, default"
    assert {(case, "ms"), (case, "share_of_read_bandwidth")} <= metrics
    assert ((case, "times_torch_sdpa") in metrics) == HAS_TORCH
    for metric in ("times_smallest_cache", "times_fewest_experts"):
        assert sum(row["metric"] == metric for row in rows) == 2
    assert all(row["benchmark"] == "benchmarks.ops" and row["median"] > 0 for row in rows)


def test_calls_take_turns_after_a_first_round_that_is_not_counted():
    order = []
    calls = {name: lambda i, name=name: order.append((name, i)) for name in ("a", "b")}
    seconds = sample_in_turn(calls, num_data_sets=2, num_samples=3)
    assert order == [("a", 0), ("a", 1), ("b", 0), ("b", 1)] * 4
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 3, "b": 3}


def test_wrong_results_are_named_and_not_timed(monkeypatch, tmp_path, capsys):
    right = cpu.paged_call
    monkeypatch.setattr(cpu, "paged_call", lambda data: lambda row: right(data)(row) * 1.001)
    monkeypatch.setattr(cpu, "scatter_call", lambda cache: lambda row: None)
    multiply = cpu.cpu_experts.expert_call
    monkeypatch.setattr(
        cpu.cpu_experts,
        "expert_call",
        lambda product: lambda data_idx: multiply(product)(data_idx)[::-1],
    )
    out = tmp_path / "rows.jsonl"
    assert run_sizes(TINY, (MIXED,), out) == 1
    printed = capsys.readouterr().out
    # Rows also have the command line of the tests.
    written = " ".join(json.loads(line)["case"] for line in out.read_text().splitlines())
    assert "WRONG: mixed, block 16, default: relative error 1.0e-03" in printed
    assert "WRONG: scatter of 64 tokens" in printed
    assert "WRONG: experts: 8 rows hit 2 of 6, 16 to 24" in printed
    assert "mixed, block 16" not in written and "scatter" not in written
    assert "experts" not in written
