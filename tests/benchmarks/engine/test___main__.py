"""The command measures paxkv with and without its prefix cache, and writes rows."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.engine.__main__ import main
from benchmarks.engine.offline_engine import EngineRun, EngineSpec
from benchmarks.workloads import Workload

OPTIONS = ["--model", "tiny", "--workload", "prefix", "--num-requests", "4", "--repetitions", "2"]
BOTH = ["--prefix-caching", "both", "--block-size", "16"]


class FakeProcess:
    """Stands for paxkv's process; with a cache, or keys in float16, it takes half the time."""

    def __init__(self, spec: EngineSpec, workload_file: Path, log_file: Path) -> None:
        assert (spec.settings["block_size"], spec.num_threads) == (16, 1)
        self._is_cached = spec.settings["enable_prefix_caching"]
        self._is_fast = self._is_cached or "kv_cache_dtype" in spec.settings
        self._workload = Workload.read(workload_file)

    def run(self, settings: dict[str, int], *, is_warm_up: bool = False) -> EngineRun:
        return EngineRun(
            token_ids=[[0] * r.num_output_tokens for r in self._workload.requests],
            figures={"prefix_hit_percent": 90.0 if self._is_cached else 0.0},
            wall_s=2.0 if self._is_fast else 4.0,
            cpu_s=1.0 if self._is_fast else 4.0,
            idle_wall_s=1.0,
            idle_cpu_s=0.5,
        )

    def __enter__(self) -> "FakeProcess":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def read(file: Path) -> dict[tuple[str, str], dict]:
    """(metric, what the case says of the prefix cache) -> row."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {(r["metric"], r["case"].partition("enable_prefix_caching=")[2]): r for r in rows}
    assert len(found) == len(rows)
    return found


def test_cache_on_and_off_become_rows_and_a_ratio(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.engine.__main__.EngineProcess", FakeProcess)
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, *BOTH, "--out", str(out)]) == 0
    rows = read(out)
    assert rows["tokens_per_s", "True"]["median"] == 4 * 16 / 2
    assert rows["tokens_per_cpu_s", "False"]["median"] == 4 * 16 / 4
    assert rows["prefix_hit_percent", "True"]["median"] == 90
    assert rows["cache_on_times_off_per_cpu_s", ""]["median"] == 4
    assert rows["cache_on_times_off_per_s", ""]["median"] == 2
    text = " ".join(capsys.readouterr().out.split())
    # The columns are headed by what sets them apart.
    assert "| metric | enable_prefix_caching=True | enable_prefix_caching=False | value |" in text
    assert "UNFAIR: on took 50.0 % of a processor while others ran." in text


def test_cache_that_changes_an_answer_is_no_result(tmp_path, capsys, monkeypatch) -> None:
    class WrongWithCache(FakeProcess):
        def run(self, settings: dict[str, int], *, is_warm_up: bool = False) -> EngineRun:
            run = super().run(settings, is_warm_up=is_warm_up)
            run.token_ids[2][0] += self._is_cached
            return run

    monkeypatch.setattr("benchmarks.engine.__main__.EngineProcess", WrongWithCache)
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, *BOTH, "--out", str(out)]) == 1
    assert not out.exists()
    text = capsys.readouterr().out
    assert "DIFFERENT: engine 'off', repetition 0: tokens of 1 of 4 requests" in text


BESIDE = ["--prefix-caching", "off", "--block-size", "16", "--beside", "kv_cache_dtype=float16"]


@pytest.fixture
def differing(monkeypatch):
    """Every engine has tokens of its own."""

    class Differing(FakeProcess):
        num_made = 0

        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            Differing.num_made += 1
            self._token_id = Differing.num_made

        def run(self, settings: dict[str, int], *, is_warm_up: bool = False) -> EngineRun:
            run = super().run(settings, is_warm_up=is_warm_up)
            run.token_ids[2][0] = self._token_id
            return run

    monkeypatch.setattr("benchmarks.engine.__main__.EngineProcess", Differing)


def test_a_second_engine_has_further_settings_and_a_ratio(tmp_path, differing, capsys) -> None:
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, *BESIDE, "--out", str(out)]) == 0
    assert "tokens are not compared: float16" in capsys.readouterr().out
    rows = read(out)
    assert rows["tokens_per_cpu_s", "False"]["median"] == 4 * 16 / 4
    assert rows["tokens_per_cpu_s", "False kv_cache_dtype=float16"]["median"] == 4 * 16
    assert rows["times_without_per_cpu_s", "False kv_cache_dtype=float16"]["median"] == 4
    assert rows["times_without_per_s", "False kv_cache_dtype=float16"]["median"] == 2


def test_static_batches_are_a_second_engine_with_the_same_tokens(tmp_path, monkeypatch) -> None:
    class Batching(FakeProcess):
        def run(self, settings: dict[str, int], *, is_warm_up: bool = False) -> EngineRun:
            run = super().run(settings, is_warm_up=is_warm_up)
            assert settings in ({}, {"batch_size": 2})
            return dataclasses.replace(run, wall_s=3.0 if settings else 2.0)

    monkeypatch.setattr("benchmarks.engine.__main__.EngineProcess", Batching)
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, "--block-size", "16", "--static-batches", "2", "--out", str(out)]) == 0
    (ratio,) = (
        row for (name, _), row in read(out).items() if name == "continuous_times_static_per_s"
    )
    assert ratio["median"] == 1.5 and ratio["case"].endswith("static_batches=2")


def test_two_comparisons_at_once_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main([*OPTIONS, *BOTH, "--static-batches", "2"])
    assert "choose one" in capsys.readouterr().err
