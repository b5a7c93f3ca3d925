"""The command compares two engines, and writes rows and ratios."""

import json
from pathlib import Path

import pytest

from benchmarks.engine import __main__ as command
from benchmarks.engine.__main__ import main
from benchmarks.engine.measure import Contender, ratios, run_in_turn
from benchmarks.engine.offline_engine import EngineRun
from tests.benchmarks.engine.fake_process import FakeProcess

OPTIONS = ["--model", "tiny", "--workload", "prefix", "--num-requests", "4", "--repetitions", "2"]
BOTH = ["--prefix-caching", "both", "--block-size", "16"]


@pytest.fixture
def fake(monkeypatch) -> type[FakeProcess]:
    """The engine with a cache takes 1 s of CPU time, that without takes 4 s."""
    monkeypatch.setattr(command, "EngineProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "WRONG", {})
    monkeypatch.setattr(FakeProcess, "CPU_S", {"on": 1.0, "off": 4.0, "beside": 1.0})
    return FakeProcess


def read(file: Path) -> dict[tuple[str, str], dict]:
    """(metric, end of the case) -> row."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {(r["metric"], r["case"].partition("enable_prefix_caching=")[2]): r for r in rows}
    assert len(found) == len(rows)
    return found


def test_cache_on_and_off_become_rows_and_a_ratio(tmp_path, capsys, fake) -> None:
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, *BOTH, "--out", str(out)]) == 0
    rows = read(out)
    assert rows["tokens_per_s", "True"]["median"] == 4 * 16
    assert rows["tokens_per_cpu_s", "False"]["median"] == 4 * 16 / 4
    assert rows["steps", "True"]["num_repetitions"] == 2
    assert rows["cache_on_times_off_per_cpu_s", ""]["median"] == 4
    assert rows["cache_on_times_off_per_s", ""]["median"] == 1
    text = " ".join(capsys.readouterr().out.split())
    # The columns are headed by the fields that differ.
    assert "| metric | enable_prefix_caching=True | enable_prefix_caching=False | value |" in text
    assert "UNFAIR: on took 5.0 % of a processor while others ran." in text
    assert "UNFAIR: off" not in text


def test_second_engine_has_further_settings_and_a_ratio(tmp_path, fake, capsys) -> None:
    fake.WRONG = {"beside": 7}  # rounded keys may choose other tokens
    out = tmp_path / "rows.jsonl"
    beside = ["--prefix-caching", "off", "--beside", "kv_cache_dtype=float16"]
    assert main([*OPTIONS, *beside, "--out", str(out)]) == 0
    assert "tokens are not compared: rounding to float16" in capsys.readouterr().out
    rows = read(out)
    assert rows["tokens_per_cpu_s", "False kv_cache_dtype=float16"]["median"] == 4 * 16
    assert rows["times_without_per_cpu_s", "False kv_cache_dtype=float16"]["median"] == 4
    with pytest.raises(SystemExit):
        main([*OPTIONS, *BOTH, "--beside", "block_size=32"])
    assert "choose one" in capsys.readouterr().err


def test_cache_that_changes_an_answer_is_no_result(tmp_path, capsys, fake) -> None:
    fake.WRONG = {"off": 7}
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, *BOTH, "--out", str(out)]) == 1
    assert not out.exists()
    text = capsys.readouterr().out
    assert "DIFFERENT: engine 'off', repetition 0: tokens of 1 of 4 requests" in text


def test_engines_take_turns_and_ratios_are_of_the_same_repetition() -> None:
    log: list[float] = []

    class Recorded:
        def run(self, settings: dict) -> EngineRun:
            log.append(settings["cpu_s"])
            # The machine becomes slower with each run.
            times = {"wall_s": 1.0, "cpu_s": settings["cpu_s"] * len(log)}
            idle = {"idle_wall_s": 1.0, "idle_cpu_s": 0.0}
            return EngineRun(token_ids=[[1, 2, 3, 4]], figures={}, **times, **idle)

    contenders = [
        Contender(label=label, process=Recorded(), settings={"cpu_s": cpu_s})
        for label, cpu_s in (("A", 1), ("B", 2))
    ]
    runs = run_in_turn(contenders, 2)
    assert log == [1, 2, 1, 2]
    # 4 / (1 * 1) over 4 / (2 * 2), then 4 / (1 * 3) over 4 / (2 * 4).
    assert ratios(runs["A"], runs["B"], "tokens_per_cpu_s") == pytest.approx([4, 8 / 3])
