"""An engine's process is pinned, is timed alone, and says why it failed."""

import os
from pathlib import Path

import pytest

from benchmarks.engine.offline_engine import EngineSpec
from benchmarks.engine.process import EngineProcess, EngineProcessError
from benchmarks.workloads import Workload, WorkloadRequest


def start(folder: Path, **settings: object) -> EngineProcess:
    request = WorkloadRequest(prompt_token_ids=[1, 2], num_output_tokens=9)
    Workload(name="two", requests=[request] * 2).write(folder / "workload.json")
    spec = EngineSpec(
        module="tests.benchmarks.engine.counting_engine",
        checkpoint="none",
        dtype="float32",
        num_threads=1,
        settings=settings,
    )
    return EngineProcess(spec, folder / "workload.json", folder / "log")


def test_runs_are_timed_alone_on_one_processor(tmp_path) -> None:
    before = os.sched_getaffinity(0)
    with start(tmp_path) as process:
        first = process.run({"cpu_s": 0.05, "sleep_s": 0.5})
        # A busy machine may make one of them slow, not all.
        others = [process.run({}) for _ in range(4)]
        assert process.logit_gap([1, 2], 3, 4) == 37
    assert os.sched_getaffinity(0) == before
    assert first.token_ids == [list(range(9))] * 2
    assert (first.figures["processors"], first.figures["omp_threads"]) == (1, 1)
    assert 0.05 <= first.cpu_s < 0.5 <= first.wall_s
    # To prepare takes 0.5 s, which are not part of a run.
    assert min(run.wall_s for run in others) < 0.5
    assert first.tokens_per_s == pytest.approx(18 / first.wall_s)
    assert first.tokens_per_cpu_s == pytest.approx(18 / first.cpu_s)
    # It did not use the processor between runs.
    assert min(run.idle_cpu_s for run in others) < 0.05


def test_failures_give_a_reason_and_the_engine_continues(tmp_path) -> None:
    with start(tmp_path) as process:
        with pytest.raises(EngineProcessError, match="RuntimeError: cannot do this here"):
            process.run({"fails": True})
        with pytest.raises(EngineProcessError, match=r"got \[8, 8\], wanted \[9, 9\]"):
            process.run({"lacks_one": True})
        assert process.run({}).num_output_tokens == 18
    with pytest.raises(EngineProcessError, match="MemoryError: no room for the model"):
        start(tmp_path, dies=True)
