"""Makes a Markdown report with tables and PNG plots from result rows.

    python -m benchmarks.report benchmarks/results/*.jsonl --out report

writes report/report.md, which has every figure and links to the plots. If a figure was measured
several times, the report uses the last row. Rows whose case has an engine and a workload become
bars of tokens per second, one plot per workload. Every other metric with two cases or more becomes
one bar per case. The thin line on a bar is the range of its repetitions. The report omits rows of
rehearsals and rows without a figure.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.command_line import BenchmarkError, output_folder, run_benchmark
from benchmarks.result_rows import REHEARSAL
from benchmarks.tables import case_fields, markdown_table, number, short_cases

SPEED_METRICS = {
    "tokens_per_cpu_s": "output tokens per CPU-second",
    "tokens_per_s": "output tokens per second",
}
# Speed metric -> metric of the same case with paxkv's speed over the engine's.
RATIO_METRICS = {
    "tokens_per_cpu_s": "paxkv_times_per_cpu_s",
    "tokens_per_s": "paxkv_times_per_s",
}
OURS = "paxkv"
# Distinct for colour-blind readers and in grey.
OUR_COLOR, OTHER_COLOR, LINE_COLOR = "#0072b2", "#b8c4ce", "#333333"
# Cases that differ in these fields get plots of their own.
FIGURE_FIELDS = ("model", "threads", "dtype", "num_requests")
MAX_PLOTS_PER_ROW = 3
BAR_INCHES = 0.38
# A longer case is drawn on two lines.
MAX_LABEL_CHARS = 60


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A result row as read from a file; see `result_rows.py` for the fields."""

    date: str
    benchmark: str
    case: str
    metric: str
    median: float
    min: float
    max: float
    num_repetitions: int
    device: str
    commit: str

    @property
    def fields(self) -> dict[str, str]:
        """The "name=value" fields of the case."""
        pairs = (field.partition("=") for field in case_fields(self.case))
        return {name: value for name, sign, value in pairs if sign}

    @property
    def is_of_an_engine(self) -> bool:
        return self.metric in SPEED_METRICS and {"engine", "workload"} <= set(self.fields)


# Field of a row -> its types; a float field may hold an integer.
_KINDS = {str: (str,), int: (int,), float: (int, float)}
_FIELD_TYPES = {field.name: _KINDS[field.type] for field in dataclasses.fields(Row)}


def read_rows(files: Sequence[Path]) -> list[Row]:
    """The last row of each benchmark, case, metric and device, in order of appearance.

    Raises:
        BenchmarkError: A file cannot be read, or a line is not a result row.
    """
    found: dict[tuple[str, str, str, str], Row] = {}
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BenchmarkError(f"{file} cannot be read: {error}.") from error
        for idx, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                if isinstance(fields, dict) and _has_no_figure(fields):
                    continue
                row = _row_of(fields)
            except (ValueError, RecursionError) as error:
                raise BenchmarkError(
                    f"{file}:{idx} is not a result row: {error}. Delete the line, or run its "
                    "benchmark again."
                ) from error
            found[row.benchmark, row.case, row.metric, row.device] = row
    return list(found.values())


def _has_no_figure(fields: dict[str, object]) -> bool:
    return fields.get("num_repetitions") == 0 or fields.get(REHEARSAL) is True


def _row_of(fields: object) -> Row:
    """Raises ValueError if these are not the fields of a result row."""
    if not isinstance(fields, dict):
        raise ValueError(f"got a {type(fields).__name__}, wanted a JSON object")
    missing = [name for name in _FIELD_TYPES if name not in fields]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    for name, types in _FIELD_TYPES.items():
        value = fields[name]
        is_wrong = not isinstance(value, types) or isinstance(value, bool)
        if is_wrong or (isinstance(value, float) and not math.isfinite(value)):
            wanted = " or ".join(t.__name__ for t in types)
            raise ValueError(f"{name} is {value!r}, wanted a finite {wanted}")
    row = Row(**{name: fields[name] for name in _FIELD_TYPES})
    if not row.min <= row.median <= row.max:
        raise ValueError(f"median {row.median} is not between {row.min} and {row.max}")
    return row


def write_report(rows: Sequence[Row], folder: Path) -> Path:
    """Writes report.md and its plots into a folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    text = ["# Results", ""]
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        of_benchmark = [row for row in rows if row.benchmark == benchmark]
        text += [f"## {benchmark}", ""]
        devices = list(dict.fromkeys(row.device for row in of_benchmark))
        for device in devices:
            of_device = [row for row in of_benchmark if row.device == device]
            # The bars of two devices would look alike.
            name = (benchmark,) if len(devices) == 1 else (benchmark, device)
            text += [f"On {device}:", ""]
            for plot in _write_plots(of_device, folder, name):
                text += [f"![{plot.stem}]({plot.name})", ""]
        text += [_table(of_benchmark), ""]
    report = folder / "report.md"
    report.write_text("\n".join(text))
    return report


def _table(rows: Sequence[Row]) -> str:
    head = ["case", "metric", "median", "least", "most", "repetitions", "device", "date", "commit"]
    lines = [
        [
            row.case,
            row.metric,
            number(row.median),
            number(row.min),
            number(row.max),
            str(row.num_repetitions),
            row.device,
            row.date,
            row.commit,
        ]
        for row in rows
    ]
    # A "|" would end its cell.
    return markdown_table(head, [[cell.replace("|", "\\|") for cell in line] for line in lines])


def _write_plots(rows: Sequence[Row], folder: Path, name: Sequence[str]) -> list[Path]:
    """Writes all plots of one benchmark on one device; their file names start with `name`."""
    plots = []
    ratios = {(row.case, row.metric): row.median for row in rows}
    engine_rows = [row for row in rows if row.is_of_an_engine]
    by_figure: dict[tuple[str, ...], list[Row]] = {}
    for row in engine_rows:
        fields = (f"{field}={row.fields[field]}" for field in FIGURE_FIELDS if field in row.fields)
        by_figure.setdefault((row.metric, *fields), []).append(row)
    for key, of_figure in by_figure.items():
        plots.append(_save(_plot_engines(of_figure, ratios), folder, *name, *key))
    by_metric: dict[str, list[Row]] = {}
    for row in rows:
        # Ratios are drawn as notes on the bars of engines.
        if not row.is_of_an_engine and not (engine_rows and row.metric in RATIO_METRICS.values()):
            by_metric.setdefault(row.metric, []).append(row)
    # Metrics of the same cases share a figure.
    by_cases: dict[tuple[str, ...], list[list[Row]]] = {}
    for of_metric in by_metric.values():
        # A single bar or bars of length 0 show nothing; the table has the figures.
        if len(of_metric) == 1 or not any(row.max for row in of_metric):
            continue
        by_cases.setdefault(tuple(row.case for row in of_metric), []).append(of_metric)
    for panels in by_cases.values():
        plots.append(_save(_plot_cases(panels), folder, *name, panels[0][0].metric))
    return plots


def _save(figure: Figure, folder: Path, *name: str) -> Path:
    file = folder / (re.sub(r"[^\w.=-]+", "_", "-".join(name)) + ".png")
    figure.savefig(file, dpi=120, bbox_inches="tight")
    return file


def _panels(
    num_panels: int, num_bars: int, label_inches: float, *, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with axes for `num_panels` sets of bars."""
    num_columns = min(num_panels, MAX_PLOTS_PER_ROW)
    num_rows = -(-num_panels // num_columns)
    size = (label_inches + 4.2 * num_columns, 0.5 + num_rows * (0.9 + BAR_INCHES * num_bars))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharey=sharey)
    for axes in grid.flat[num_panels:]:
        axes.set_axis_off()
    return figure, list(grid.flat[:num_panels])


def _plot_engines(rows: Sequence[Row], ratios: dict[tuple[str, str], float]) -> Figure:
    """One set of bars per workload, one bar per engine.

    Args:
        ratios: (case, metric) -> paxkv's speed over the engine's, where measured.
    """
    workloads = list(dict.fromkeys(row.fields["workload"] for row in rows))
    of_workload = {
        name: [row for row in rows if row.fields["workload"] == name] for name in workloads
    }
    figure, panels = _panels(len(workloads), max(map(len, of_workload.values())), 1.5)
    metric = rows[0].metric
    for axes, (workload, of_axes) in zip(panels, of_workload.items(), strict=True):
        notes = []
        for row in of_axes:
            ratio = ratios.get((row.case, RATIO_METRICS[metric]))
            note = "" if ratio is None else f"   ({OURS} {ratio:.1f}×)"
            notes.append(number(row.median) + note)
        _draw_bars(axes, of_axes, _engine_labels(of_axes), notes)
        axes.set_title(workload, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel(SPEED_METRICS[metric], fontsize=9)
        axes.invert_yaxis()
    named = (f"{name} {rows[0].fields[name]}" for name in FIGURE_FIELDS if name in rows[0].fields)
    figure.suptitle(f"{rows[0].benchmark}: {', '.join(named)}", fontsize=11)
    return figure


def _engine_labels(rows: Sequence[Row]) -> list[str]:
    """The engine of each row, with the other fields in which the rows differ."""
    _, left = short_cases([row.case for row in rows])
    labels = []
    for row, case in zip(rows, left, strict=True):
        others = [field for field in case_fields(case) if not field.startswith("engine=")]
        labels.append("\n".join([row.fields["engine"], *filter(None, others)]))
    return labels


def _plot_cases(metrics: Sequence[Sequence[Row]]) -> Figure:
    """One bar per case, and one set of bars per metric."""
    cases = [row.case for row in metrics[0]]
    common, labels = short_cases(cases)
    # If a case has only the common fields, all labels show the whole case.
    if not all(labels):
        common, labels = "", cases
    labels = [_in_two_lines(label) for label in labels]
    widest = max(len(line) for label in labels for line in label.split("\n"))
    figure, panels = _panels(len(metrics), len(cases), 0.5 + 0.07 * widest, sharey=True)
    for axes, rows in zip(panels, metrics, strict=True):
        _draw_bars(axes, rows, labels, [number(row.median) for row in rows])
        axes.set_title(rows[0].metric.replace("_", " "), loc="left", fontsize=10)
    # The axes share y, so one call inverts all.
    panels[0].invert_yaxis()
    figure.suptitle("\n".join(filter(None, [metrics[0][0].benchmark, common])), fontsize=11)
    return figure


def _in_two_lines(label: str) -> str:
    if len(label) <= MAX_LABEL_CHARS:
        return label
    spaces = [place for place, char in enumerate(label) if char == " "]
    middle = min(spaces, key=lambda place: abs(place - len(label) / 2), default=None)
    return label if middle is None else f"{label[:middle]}\n{label[middle + 1 :]}"


def _draw_bars(
    axes: Axes, rows: Sequence[Row], labels: Sequence[str], notes: Sequence[str]
) -> None:
    """Draws horizontal bars from the bottom up, each with its range and a note."""
    places = range(len(rows))
    is_peer = [row.fields.get("engine", OURS).partition("-")[0] != OURS for row in rows]
    colors = [OTHER_COLOR if peer else OUR_COLOR for peer in is_peer]
    axes.barh(places, [row.median for row in rows], color=colors, height=0.62)
    for place, row in zip(places, rows, strict=True):
        if row.min == row.max:
            continue
        axes.errorbar(
            row.median,
            place,
            xerr=[[row.median - row.min], [row.max - row.median]],
            fmt="none",
            ecolor=LINE_COLOR,
            elinewidth=1,
            capsize=2.5,
        )
    for place, row, note in zip(places, rows, notes, strict=True):
        axes.annotate(
            note,
            (max(row.max, 0), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(places, labels, fontsize=8.5)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    # Room for the notes.
    low, high = min(0.0, *(row.min for row in rows)), max(row.max for row in rows)
    longest = max(map(len, notes))
    axes.set_xlim(low, (high or 1.0) * (1.08 + 0.017 * longest))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, help="files of JSON lines")
    parser.add_argument("--out", type=output_folder, required=True, help="folder to write into")
    arguments = parser.parse_args(argv)
    rows = read_rows(arguments.files)
    if not rows:
        raise BenchmarkError(f"no result row in {', '.join(map(str, arguments.files))}.")
    report = write_report(rows, arguments.out)
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
