"""Engines run in turn; ratios are of the same repetition."""

from benchmarks.engine.measure import (
    Contender,
    ratios,
    restless,
    run_in_turn,
    speed_rows,
)
from benchmarks.engine.offline_engine import EngineRun


def run(wall_s: float = 1.0, cpu_s: float = 1.0, idle_cpu_s: float = 0.0, **figures: float):
    return EngineRun(
        token_ids=[[1, 2, 3, 4]],
        figures=figures,
        wall_s=wall_s,
        cpu_s=cpu_s,
        idle_wall_s=10.0,
        idle_cpu_s=idle_cpu_s,
    )


class Recorded:
    """Stands for a process; writes down who ran with what."""

    def __init__(self, log: list) -> None:
        self._log = log

    def run(self, settings: dict) -> EngineRun:
        self._log.append(settings["name"])
        return run()


def test_engines_take_turns() -> None:
    log: list[str] = []
    contenders = [
        Contender(label=name, process=Recorded(log), settings={"name": name}) for name in "ABC"
    ]
    runs = run_in_turn(contenders, 2)
    assert "".join(log) == "ABCABC"
    assert {label: len(of_label) for label, of_label in runs.items()} == {"A": 2, "B": 2, "C": 2}


def test_ratio_is_of_the_same_repetition() -> None:
    ours, others = [run(cpu_s=1), run(cpu_s=2)], [run(cpu_s=4), run(cpu_s=6)]
    assert ratios(ours, others, "tokens_per_cpu_s") == [4.0, 3.0]


def test_an_engine_that_does_not_rest_is_named() -> None:
    (line,) = restless({"A": [run(), run(idle_cpu_s=0.5)], "B": [run(idle_cpu_s=0.1)]})
    assert line == "UNFAIR: A took 5.0 % of a processor while others ran."


def test_figures_become_rows() -> None:
    rows = speed_rows("b", "c", [run(wall_s=2, cpu_s=1, steps=3), run(steps=5)], "chip")
    values = {row.metric: row.values for row in rows}
    assert values == {"tokens_per_cpu_s": [4, 4], "tokens_per_s": [2, 4], "steps": [3, 5]}
