"""A report shows every figure once, and draws bars where there is something to see."""

import json

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.report import main, read_rows, write_report


def row(benchmark: str, case: str, metric: str, median: float, **others: object) -> dict:
    fields = {
        "date": "2026-01-02",
        "benchmark": benchmark,
        "case": case,
        "metric": metric,
        "median": median,
        "min": median * 0.9,
        "max": median * 1.2,
        "num_repetitions": 3,
        "device": "a processor",
        "versions": {"python": "3.11"},
        "commit": "abc1234",
        "command": "python -m x",
    }
    return fields | others


def write(file, rows):
    file.write_text("".join(json.dumps(fields) + "\n" for fields in rows))
    return file


def engine_rows() -> list[dict]:
    rows = []
    for workload in ("mixed", "skewed"):
        for engine, median in (("paxkv", 900.0), ("static-8", 300.0)):
            case = f"model=tiny workload={workload} threads=1 engine={engine}"
            rows.append(row("benchmarks.compare_torch", case, "tokens_per_cpu_s", median))
        rows.append(row("benchmarks.compare_torch", case, "paxkv_times_per_cpu_s", 3.0))
    return rows


def texts_of(figure) -> str:
    texts = [t for axes in figure.axes for t in (*axes.texts, axes.title, *axes.get_yticklabels())]
    lefts = [axes.get_title(loc="left") for axes in figure.axes]
    return " | ".join([text.get_text() for text in texts] + lefts)


def test_engines_are_bars_of_one_plot_by_workload(tmp_path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, file, **_: figures.append(figure)
    )
    write_report(read_rows([write(tmp_path / "rows.jsonl", engine_rows())]), tmp_path / "out")
    (figure,) = figures
    assert len(figure.axes) == 2
    assert [len(axes.patches) for axes in figure.axes] == [2, 2]
    assert [bar.get_width() for bar in figure.axes[0].patches] == [900.0, 300.0]
    texts = texts_of(figure)
    for text in ("mixed", "skewed", "static-8", "300   (paxkv 3.0×)"):
        assert text in texts


def test_metrics_of_the_same_cases_share_a_figure(tmp_path) -> None:
    rows = [
        row("benchmarks.host.kv_waste", f"block_size={size} runs=[0, 1]", metric, size / 10)
        for metric in ("paged_percent", "contiguous_percent")
        for size in (16, 64)
    ]
    rows.append(row("benchmarks.host.kv_waste", "block_size=16 runs=[0, 1]", "preemptions", 0.0))
    assert main([str(write(tmp_path / "rows.jsonl", rows)), "--out", str(tmp_path / "out")]) == 0
    (plot,) = (tmp_path / "out").glob("*.png")
    assert plot.name == "benchmarks.host.kv_waste-paged_percent.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"({plot.name})" in text
    # Every figure is in the table, also the one that there is nothing to draw of.
    assert sum(line.startswith("| block_size=") for line in text.splitlines()) == 5
    assert "preemptions" in text


@pytest.mark.parametrize(
    "line",
    [
        '{"median": 1}',
        "{",
        "[1]",
        json.dumps(row("b", "c", "m", 1.0) | {"median": "1"}),
        json.dumps(row("b", "c", "m", float("nan"))),
        json.dumps(row("b", "c", "m", 1.0, min=2.0)),
        json.dumps(row("b", None, "m", 1.0)),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row('b', 'c', 'm', 1.0))}\n{line}\n")
    with pytest.raises(BenchmarkError, match=r"rows\.jsonl:2 is no result row"):
        read_rows([file])


def test_a_case_keeps_a_row_for_each_device(tmp_path) -> None:
    rows = [row("b", "c", "m", 1.0) | {"device": device} for device in ("cpu", "gpu")]
    found = read_rows([write(tmp_path / "rows.jsonl", [*rows, rows[0] | {"median": 1.1}])])
    assert {r.device: r.median for r in found} == {"cpu": 1.1, "gpu": 1.0}


def test_rows_without_a_figure_and_rehearsed_rows_are_left_out(tmp_path) -> None:
    failed = {
        k: v for k, v in row("b", "c", "none", 1.0).items() if k not in ("median", "min", "max")
    }
    rows = [failed | {"num_repetitions": 0}, row("b", "d", "m", 1.0, rehearsal=True)]
    assert (
        read_rows([write(tmp_path / "rows.jsonl", [*rows, row("b", "e", "m", 1.0)])])[0].case == "e"
    )
