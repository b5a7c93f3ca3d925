"""The CPU half in small: it checks before it times, and says what is wrong."""

import dataclasses
import json

from benchmarks.ops import cpu
from benchmarks.ops.cpu import QUICK, run_sizes
from benchmarks.ops.cpu_attention import CpuBatch
from benchmarks.ops.cpu_torch_sdpa import HAS_TORCH

TINY = dataclasses.replace(
    QUICK,
    num_samples=2,
    block_sizes=(16,),
    bytes_in_turn=1,
    read_buffer_bytes=4 << 20,
    scatter_bytes=(4 << 20, 8 << 20),
)
DECODE = CpuBatch(name="decodes", requests=((1, 40), (1, 3), (1, 40)))
MIXED = CpuBatch(name="mixed", requests=((20, 50), (1, 30)))


def test_every_figure_becomes_a_row(tmp_path, capsys, monkeypatch):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(cpu, "COMPILER_OPTIONS", {"default": {}})
    assert run_sizes(TINY, (DECODE,), out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    metrics = {(row["case"], row["metric"]) for row in rows}
    assert len(metrics) == len(rows)
    for case in ("decodes, block 16, default",):
        assert (case, "ms") in metrics
        assert (case, "share_of_read_bandwidth") in metrics
        assert ((case, "times_torch_sdpa") in metrics) == HAS_TORCH
    assert sum(row["metric"] == "times_smallest_cache" for row in rows) == 2
    assert all(row["benchmark"] == "benchmarks.ops" and row["median"] > 0 for row in rows)
    assert ("torch is not installed" in capsys.readouterr().out) != HAS_TORCH


def test_a_wrong_result_is_named_and_not_timed(monkeypatch, tmp_path, capsys):
    right = cpu.paged_call

    def wrong(*arguments):
        call = right(*arguments)
        return lambda row: call(row) * 1.001

    monkeypatch.setattr(cpu, "paged_call", wrong)
    monkeypatch.setattr(cpu, "COMPILER_OPTIONS", {"default": {}})
    out = tmp_path / "rows.jsonl"
    assert run_sizes(TINY, (MIXED,), out) == 1
    assert "WRONG: mixed, block 16, default: relative error 1.0e-03" in capsys.readouterr().out
    assert "mixed, block 16" not in out.read_text()


def test_a_scatter_that_misses_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "scatter_call", lambda caches: lambda row: None)
    assert run_sizes(TINY, (), None) == 1
    assert "WRONG: scatter of 64 tokens" in capsys.readouterr().out
