"""The command compares two engines, and writes rows and ratios."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.engine import __main__ as command
from benchmarks.engine.__main__ import main
from benchmarks.engine.measure import Contender, ratios, run_in_turn
from benchmarks.engine.offline_engine import EngineRun
from tests.benchmarks.engine.fake_process import FakeProcess

OPTIONS = ["--model", "tiny", "--workload", "prefix", "--num-requests", "4", "--repetitions", "2"]
BOTH = ["--prefix-caching", "both", "--block-size", "16"]
BESIDE = ["--prefix-caching", "off", "--beside", "kv_cache_dtype=float16"]


@pytest.fixture
def fake(monkeypatch) -> type[FakeProcess]:
    """The engine with a cache takes 1 s of CPU time, that without takes 4 s."""
    monkeypatch.setattr(command, "EngineProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "WRONG", {})
    monkeypatch.setattr(FakeProcess, "CPU_S", {"on": 1.0, "off": 4.0, "beside": 1.0})
    return FakeProcess


@pytest.mark.parametrize(
    ("flags", "cases", "ratio"),
    [
        (BOTH, ("True", "False"), "cache_on_times_off"),
        (BESIDE, ("False kv_cache_dtype=float16", "False"), "times_without"),
    ],
)
def test_two_engines_become_rows_and_a_ratio(flags, cases, ratio, tmp_path, capsys, fake) -> None:
    fake.WRONG = {"beside": 7}  # rounded keys may choose other tokens
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, *flags, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(r["metric"], r["case"].partition("enable_prefix_caching=")[2]): r for r in rows}
    assert len(found) == len(rows)
    assert found["tokens_per_s", cases[0]]["median"] == 4 * 16
    assert [found["tokens_per_cpu_s", case]["median"] for case in cases] == [4 * 16, 4 * 16 / 4]
    assert found["steps", cases[0]]["num_repetitions"] == 2
    medians = {r["metric"]: r["median"] for r in rows if r["metric"].startswith(ratio)}
    assert medians == {f"{ratio}_per_cpu_s": 4, f"{ratio}_per_s": 1}
    text = capsys.readouterr().out
    assert ("UNFAIR: on took 5.0 % of a processor while others ran." in text) == (flags == BOTH)
    assert "UNFAIR: off" not in text
    assert ("tokens are not compared: rounding to float16" in text) == (flags == BESIDE)
    with pytest.raises(SystemExit):
        main([*OPTIONS, *BOTH, *BESIDE[2:]])


def test_cache_that_changes_an_answer_is_no_result(tmp_path, capsys, fake) -> None:
    fake.WRONG = {"off": 7}
    out = tmp_path / "rows.jsonl"
    assert main([*OPTIONS, *BOTH, "--out", str(out)]) == 1
    assert not out.exists()
    text = "DIFFERENT: engine 'off', repetition 0: the tokens of 1 of 4 requests differ"
    assert text in capsys.readouterr().out


def test_engines_take_turns_and_ratios_are_of_the_same_repetition() -> None:
    log: list[float] = []

    def run(settings: dict) -> EngineRun:
        log.append(settings["cpu_s"])
        # The machine becomes slower with each run.
        times = {"wall_s": 1.0, "cpu_s": log[-1] * len(log), "idle_wall_s": 1.0, "idle_cpu_s": 0.0}
        return EngineRun(token_ids=[[1, 2, 3, 4]], figures={}, **times)

    contenders = [
        Contender(label=label, process=SimpleNamespace(run=run), settings={"cpu_s": cpu_s})
        for label, cpu_s in (("A", 1), ("B", 2))
    ]
    runs = run_in_turn(contenders, 2)
    assert log == [1, 2, 1, 2]
    # 4 / (1 * 1) over 4 / (2 * 2), then 4 / (1 * 3) over 4 / (2 * 4).
    assert ratios(runs["A"], runs["B"], "tokens_per_cpu_s") == pytest.approx([4, 8 / 3])
