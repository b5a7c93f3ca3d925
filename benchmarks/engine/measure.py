"""Runs engines in turn, repetition by repetition, and makes result rows."""

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.engine.offline_engine import EngineRun, Setting
from benchmarks.engine.process import EngineProcess
from benchmarks.result_rows import ResultRow

# An engine that uses more than this share of a processor while others run disturbs them.
MAX_IDLE_SHARE = 0.02
# Shorter idle times are not checked.
MIN_IDLE_WALL_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An engine and the settings of its runs.

    Args:
        label: Name in tables and rows, such as `static-8`.
    """

    label: str
    process: EngineProcess
    settings: Mapping[str, Setting]


def run_in_turn(
    contenders: Sequence[Contender], num_repetitions: int
) -> dict[str, list[EngineRun]]:
    """Runs contenders in the order A B C A B C, so that changes in load affect all engines alike.

    Raises:
        EngineProcessError: An engine failed.
    """
    runs: dict[str, list[EngineRun]] = {contender.label: [] for contender in contenders}
    for _ in range(num_repetitions):
        for contender in contenders:
            runs[contender.label].append(contender.process.run(contender.settings))
    return runs


def unfair_engines(runs: Mapping[str, Sequence[EngineRun]]) -> list[str]:
    """One line per engine that used the processor while others ran."""
    lines = []
    for label, of_label in runs.items():
        shares = [
            run.idle_cpu_s / run.idle_wall_s
            for run in of_label
            if run.idle_wall_s >= MIN_IDLE_WALL_S
        ]
        if shares and max(shares) > MAX_IDLE_SHARE:
            lines.append(
                f"UNFAIR: {label} took {100 * max(shares):.1f} % of a processor while others ran."
            )
    return lines


def ratios(ours: Sequence[EngineRun], others: Sequence[EngineRun], figure: str) -> list[float]:
    """Our figure divided by the other engine's, per repetition.

    Args:
        figure: A property of `EngineRun`.
    """
    pairs = zip(ours, others, strict=True)
    return [getattr(our, figure) / getattr(other, figure) for our, other in pairs]


def speed_rows(
    benchmark: str, case: str, runs: Sequence[EngineRun], device: str
) -> list[ResultRow]:
    """Rows of tokens per CPU-second and per second, and of every figure that the engine counted."""
    values = {
        "tokens_per_cpu_s": [run.tokens_per_cpu_s for run in runs],
        "tokens_per_s": [run.tokens_per_s for run in runs],
    }
    for name in runs[0].figures:
        values[name] = [run.figures[name] for run in runs if name in run.figures]
    return [
        ResultRow(benchmark=benchmark, case=case, metric=metric, values=of_metric, device=device)
        for metric, of_metric in values.items()
    ]
