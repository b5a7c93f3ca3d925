"""All peers make the same greedy tokens; the command compares theirs with paxkv's."""

import json
from pathlib import Path

import pytest

from benchmarks.compare_torch import cpu
from benchmarks.compare_torch.cpu import PEERS, main
from benchmarks.engine.offline_engine import EngineSpec
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from benchmarks.workloads import make_workload
from tests.benchmarks.engine.fake_process import FakeProcess

pytest.importorskip("torch")
pytest.importorskip("transformers")
# After the lines above: these import torch.
from benchmarks.compare_torch import contiguous_cache, continuous_batching, static_batches

# Prompts and outputs of all lengths; two batches, the last of them not full.
WORKLOAD = make_workload("mixed", vocab_size=256).first(5, max_output_tokens=24)
RUNS = {
    "static": (static_batches, {"batch_size": 3}),
    "continuous": (continuous_batching, {"max_requests": 3}),
    "contiguous": (contiguous_cache, {"batch_size": 3}),
}
OPTIONS = ["--model", "tiny", "--num-requests", "4", "--repetitions", "2"]


def test_peers_make_the_tokens_of_each_request_alone(tmp_path: Path) -> None:
    checkpoint = str(write_checkpoint(tmp_path, MODEL_SHAPES["tiny"]))
    common = {"module": "x", "dtype": "float32", "num_threads": 1, "settings": {}}
    spec = EngineSpec(checkpoint=checkpoint, **common)
    wanted = static_batches.load_engine(spec, WORKLOAD).run(WORKLOAD, batch_size=1).token_ids
    assert [len(ids) for ids in wanted] == [r.num_output_tokens for r in WORKLOAD.requests]
    assert len({tuple(ids) for ids in wanted}) == len(wanted)
    for kind, (module, settings) in RUNS.items():
        assert (module.__name__, list(settings)) == (PEERS[kind][0], [PEERS[kind][1]])
        engine = module.load_engine(spec, WORKLOAD)
        engine.prepare()
        assert engine.run(WORKLOAD, **settings).token_ids == wanted, kind
        engine.close()


def test_command_writes_a_ratio_for_each_peer(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "EngineProcess", FakeProcess)
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, "--engines", "static-3", "contiguous-4", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ratio = {
        row["case"].partition("engine=")[2].split()[0]: row["median"]
        for row in rows
        if row["metric"] == "paxkv_times_per_cpu_s"
    }
    assert ratio == {"static-3": 1.5, "contiguous-4": 2.0}
    assert sum(row["metric"] == "tokens_per_cpu_s" for row in rows) == 3
    assert "| contiguous-4 |" in capsys.readouterr().out


def test_command_fails_where_tokens_differ_and_writes_no_row(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "EngineProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "WRONG", {"contiguous": 7})
    out = tmp_path / "rows.jsonl"
    options = [*OPTIONS, "--engines", "static-2", "contiguous-2", "--out", str(out)]
    assert main(options) == 1
    assert not out.exists()
    text = capsys.readouterr().out
    assert "DIFFERENT: contiguous-2, repetition 0: 1 of 4 requests; request 2, new token 1" in text
    assert "got 7, wanted 1, whose logit is higher by 5.00e-01" in text
    assert "DIFFERENT: static-2" not in text
    assert main([*options, "--tie-gap", "0.5"]) == 0
    assert "1 ties within 0.5" in capsys.readouterr().out
    # Rounded products may choose other tokens.
    assert main([*options, "--set", "product_dtype=int8"]) == 0
    assert "tokens are not compared: rounding to int8" in capsys.readouterr().out
