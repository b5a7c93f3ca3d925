"""All peers make the same greedy tokens; the command compares theirs with paxkv's."""

import json
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.compare_torch.compare_tokens import differences
from benchmarks.compare_torch.cpu import PEERS, main
from benchmarks.engine.offline_engine import EngineRun, EngineSpec
from benchmarks.engine.process import EngineProcessError
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from benchmarks.workloads import Workload, make_workload

pytest.importorskip("torch")
pytest.importorskip("transformers")
# After the lines above: these import torch.
from benchmarks.compare_torch import (
    contiguous_cache,
    continuous_batching,
    static_batches,
)

# Prompts and outputs of all lengths; two batches, the last of them not full.
WORKLOAD = make_workload("mixed", vocab_size=256).first(5, max_output_tokens=24)
RUNS = {
    "static-3": (static_batches, {"batch_size": 3}),
    "continuous-3": (continuous_batching, {"max_requests": 3}),
    "contiguous-3": (contiguous_cache, {"batch_size": 3}),
}


def spec_of(checkpoint: Path, module: str) -> EngineSpec:
    return EngineSpec(
        module=module,
        checkpoint=str(checkpoint),
        dtype="float32",
        num_threads=1,
        settings={},
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), MODEL_SHAPES["tiny"])


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[list[int]]:
    """What transformers makes of each request alone."""
    engine = static_batches.load_engine(spec_of(checkpoint, "static"), WORKLOAD)
    return engine.run(WORKLOAD, batch_size=1).token_ids


@pytest.mark.parametrize("peer", RUNS)
def test_peer_makes_the_tokens_of_each_request_alone(peer: str, checkpoint, wanted) -> None:
    module, settings = RUNS[peer]
    kind = peer.partition("-")[0]
    assert (module.__name__, list(settings)) == (PEERS[kind][0], [PEERS[kind][1]])
    engine = module.load_engine(spec_of(checkpoint, module.__name__), WORKLOAD)
    engine.prepare()
    token_ids = engine.run(WORKLOAD, **settings).token_ids
    assert [len(ids) for ids in token_ids] == [r.num_output_tokens for r in WORKLOAD.requests]
    assert differences(WORKLOAD, wanted, token_ids, None) == []
    assert len({tuple(ids) for ids in wanted}) == len(wanted)
    engine.close()


class FakeProcess:
    """Stands for an engine's process; every token is 1, except where its kind is in `WRONG`."""

    WRONG: ClassVar[dict[str, int]] = {}

    def __init__(self, spec: EngineSpec, workload_file: Path, log_file: Path) -> None:
        self._workload = Workload.read(workload_file)
        self._kind = log_file.stem

    def run(self, settings: dict[str, int], *, is_warm_up: bool = False) -> EngineRun:
        token = self.WRONG.get(self._kind, 1)
        return EngineRun(
            token_ids=[[token] * r.num_output_tokens for r in self._workload.requests],
            figures={"steps": 3.0} if self._kind == "paxkv" else {},
            wall_s=1.0,
            # paxkv takes 2 seconds; the others as many as their number.
            cpu_s=float(next(iter(settings.values()), 2)),
            idle_wall_s=1.0,
            idle_cpu_s=0.0,
        )

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        return 0.5 if (first, second) == (1, 7) else -0.5

    def __enter__(self) -> "FakeProcess":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


@pytest.fixture
def fake(monkeypatch) -> type[FakeProcess]:
    monkeypatch.setattr("benchmarks.compare_torch.cpu.EngineProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "WRONG", {})
    return FakeProcess


OPTIONS = ["--model", "tiny", "--num-requests", "4", "--repetitions", "2"]


def test_command_writes_a_ratio_for_each_peer(fake, tmp_path, capsys) -> None:
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
    assert sum(row["metric"] == "steps" for row in rows) == 1
    assert "| contiguous-4 |" in capsys.readouterr().out


def test_command_fails_where_tokens_differ_and_writes_no_row(fake, capsys, tmp_path) -> None:
    fake.WRONG = {"contiguous": 7}
    out = tmp_path / "rows.jsonl"
    options = [*OPTIONS, "--engines", "static-2", "contiguous-2", "--out", str(out)]
    assert main(options) == 1
    assert not out.exists()
    text = capsys.readouterr().out
    assert "DIFFERENT: contiguous-2, repetition 0: 4 of 4 requests; request 0, new token 0" in text
    assert "got 7, wanted 1, whose logit is higher by 5.00e-01" in text
    assert "DIFFERENT: static-2" not in text
    assert main([*options, "--tie-gap", "0.5"]) == 0
    assert "4 ties within 0.5" in capsys.readouterr().out
    assert out.exists()
    # Rounded products are allowed to choose others.
    assert main([*options, "--set", "product_dtype=int8"]) == 0
    assert "tokens are not compared: int8" in capsys.readouterr().out


def test_a_peer_that_does_not_run_is_named(monkeypatch, capsys) -> None:
    def fail(*arguments: object) -> None:
        raise EngineProcessError("static: RuntimeError: not on this CPU")

    monkeypatch.setattr("benchmarks.compare_torch.cpu.EngineProcess", fail)
    assert main([*OPTIONS, "--engines", "static-2"]) == 1
    assert "FAILED: static: RuntimeError: not on this CPU" in capsys.readouterr().out
