"""The CPU half in small: it checks before it times, and says what is wrong."""

import dataclasses
import json

import pytest

from benchmarks.ops import cpu
from benchmarks.ops.cpu import QUICK, run_sizes
from benchmarks.ops.cpu_attention import CpuBatch, batches
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


def test_every_figure_becomes_a_row(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert run_sizes(TINY, (DECODE, MIXED), out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    metrics = {(row["case"], row["metric"]) for row in rows}
    assert len(metrics) == len(rows)
    for case in ("decodes, block 16, default", "mixed, block 16, YNNPACK off"):
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
    out = tmp_path / "rows.jsonl"
    assert run_sizes(TINY, (MIXED,), out) == 1
    assert "WRONG: mixed, block 16, default: relative error 1.0e-03" in capsys.readouterr().out
    assert "mixed, block 16" not in out.read_text()


def test_a_scatter_that_misses_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "scatter_call", lambda caches: lambda row: None)
    assert run_sizes(TINY, (), None) == 1
    assert "WRONG: scatter of 64 tokens" in capsys.readouterr().out


def test_the_batches_are_those_that_are_wanted():
    by_name = {batch.name: batch for batch in batches()}
    assert by_name["64 decodes at 256"].kv_bytes == 64 * 256 * 2 * 4 * 64 * 4
    chunk = next(batch for batch in batches() if batch.max_query_len > 1)
    assert (chunk.num_tokens, chunk.max_query_len) == (544, 512)
    lengths = [seq_len for _, seq_len in by_name["64 decodes at 32 to 512"].requests]
    assert (min(lengths), max(lengths), len(lengths)) == (32, 512, 64)


@pytest.mark.skipif(not HAS_TORCH, reason="torch is an optional peer")
def test_an_unfair_peer_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "tokens_of", lambda data, _: 1.1 * data.q)
    assert run_sizes(TINY, (DECODE,), None) == 1
    assert "unfair peer" in capsys.readouterr().out
