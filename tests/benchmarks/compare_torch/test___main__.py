"""All peers make the same greedy tokens; the command compares theirs with paxkv's."""

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.compare_torch import __main__ as compare
from benchmarks.compare_torch.__main__ import PEERS, main
from benchmarks.engine.offline_engine import EngineSpec
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from benchmarks.workloads import make_workload
from tests.benchmarks.engine.fake_process import FakeProcess

pytest.importorskip("torch")
pytest.importorskip("transformers")
# Prompts and outputs of all lengths; two batches, the last of them not full.
WORKLOAD = make_workload("mixed", vocab_size=256).first(5, max_output_tokens=24)


@pytest.mark.slow
def test_peers_make_the_tokens_of_each_request_alone(tmp_path: Path) -> None:
    checkpoint = str(write_checkpoint(tmp_path, MODEL_SHAPES["tiny"]))
    common = {"module": "x", "dtype": "float32", "num_threads": 1, "settings": {}}
    spec = EngineSpec(checkpoint=checkpoint, **common)
    modules = {importlib.import_module(module): setting for module, setting in PEERS.values()}
    static = next(iter(modules)).load_engine(spec, WORKLOAD)
    wanted = static.run(WORKLOAD, batch_size=1).token_ids
    assert [len(ids) for ids in wanted] == [r.num_output_tokens for r in WORKLOAD.requests]
    assert len({tuple(ids) for ids in wanted}) == len(wanted)
    for module, setting in modules.items():
        engine = module.load_engine(spec, WORKLOAD)
        engine.prepare()
        assert engine.run(WORKLOAD, **{setting: 3}).token_ids == wanted, module
        engine.close()


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with fake engines; returns its exit code and its rows."""
    monkeypatch.setattr(compare, "EngineProcess", FakeProcess)
    out = tmp_path / "rows.jsonl"

    def run(*flags: str) -> tuple[int, list[dict]]:
        out.write_text("")
        code = main(["--model", "tiny", "--num-requests", "4", "--out", str(out), *flags])
        return code, [json.loads(line) for line in out.read_text().splitlines()]

    return run


def test_command_writes_a_ratio_for_each_peer(command) -> None:
    code, rows = command("--engines", "static-3", "contiguous-4")
    assert code == 0
    ratios = [row for row in rows if row["metric"] == "paxkv_times_per_cpu_s"]
    medians = {row["case"].partition("engine=")[2].split()[0]: row["median"] for row in ratios}
    assert medians == {"static-3": 1.5, "contiguous-4": 2.0}
    assert sum(row["metric"] == "tokens_per_cpu_s" for row in rows) == 3


def test_command_fails_where_tokens_differ_and_writes_no_row(command, capsys, monkeypatch) -> None:
    monkeypatch.setattr(FakeProcess, "WRONG", {"contiguous": 7})
    engines = ("--engines", "static-2", "contiguous-2")
    assert command(*engines) == (1, [])
    text = capsys.readouterr().out
    assert "DIFFERENT: contiguous-2, repetition 0: 1 of 4 requests; request 2, new token 1" in text
    assert "got 7, wanted 1, whose logit is higher by 5.00e-01" in text
    assert "DIFFERENT: static-2" not in text
    assert command(*engines, "--tie-gap", "0.5")[0] == 0
    assert "1 ties within 0.5" in capsys.readouterr().out
    assert command("--engines", "contiguous-2", "--tie-gap", "0.5") == (1, [])  # no peer has logits
    assert command(*engines, "--set", "product_dtype=int8")[0] == 0  # rounded tokens may differ
