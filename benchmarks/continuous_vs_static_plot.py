"""Draws static and continuous batching as Gantt charts: a row for each slot, a bar a request."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.continuous_vs_static import BatchingRun

_SHORT_COLOR, _LONG_COLOR = "#4c8fbf", "#c4573a"
_PROMPT_ALPHA = 0.45
_WAIT_COLOR = "#e6e6e6"
# Outputs above this share of the longest one are drawn as long.
_LONG_SHARE = 0.5
_TITLES = {"static": "Static batching", "continuous": "Continuous batching"}


def draw_runs(runs: Sequence[BatchingRun], file: Path) -> None:
    """Writes a PNG with one chart a run, above each other, on the same axis of time."""
    num_slots = runs[0].num_slots
    figure = Figure(figsize=(13, 2.0 + 0.36 * num_slots * len(runs)), layout="constrained")
    all_axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    end_s = max(run.wall_s for run in runs)
    longest = max(bar.num_tokens for run in runs for bar in run.bars)
    for axes, run in zip(all_axes, runs, strict=True):
        _draw_run(axes, run, end_s, _LONG_SHARE * longest)
    all_axes[-1].set_xlabel("seconds since the first request arrived")
    all_axes[-1].set_xlim(0, 1.01 * end_s)
    figure.suptitle(f"The same {len(runs[0].bars)} requests in {num_slots} slots", fontsize=13)
    figure.legend(
        handles=[
            Patch(color=_SHORT_COLOR, label="short output"),
            Patch(color=_LONG_COLOR, label="long output"),
            Patch(color="#888888", alpha=_PROMPT_ALPHA, label="until its first token (pale)"),
            Patch(color=_WAIT_COLOR, label="slot waits for the batch's longest request"),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(file, dpi=130)


def _draw_run(axes: Axes, run: BatchingRun, end_s: float, long_from: float) -> None:
    for bar in run.bars:
        color = _LONG_COLOR if bar.num_tokens > long_from else _SHORT_COLOR
        until_first, after = bar.first_token_s - bar.start_s, bar.end_s - bar.first_token_s
        place = {"height": 0.84, "lw": 0, "color": color}
        axes.barh(bar.slot, until_first, left=bar.start_s, alpha=_PROMPT_ALPHA, **place)
        axes.barh(bar.slot, after, left=bar.first_token_s, **place)
        # The edge keeps neighbours in a slot apart.
        whole = bar.end_s - bar.start_s
        axes.barh(bar.slot, whole, 0.84, left=bar.start_s, fill=False, ec="white", lw=1)
        # Where both parts are narrow, the number would hide them.
        middle, width = bar.first_token_s + after / 2, after
        if until_first > after:
            middle, width = bar.start_s + until_first / 2, until_first
        if width > 0.012 * end_s:
            text_color = "white" if width == after else "#333333"
            place = {"ha": "center", "va": "center", "fontsize": 8, "color": text_color}
            axes.text(middle, bar.slot, str(bar.index), **place)
    if run.mode == "static":
        _draw_waits(axes, run)
    axes.axvline(run.wall_s, color="#333333", lw=1.2)
    axes.set_title(
        f"{_TITLES[run.mode]}: {run.wall_s:.2f} s, slots {run.occupancy_percent:.0f} % occupied",
        loc="left",
        fontsize=12,
    )
    axes.set_ylim(run.num_slots - 0.4, -0.6)
    axes.set_yticks(range(run.num_slots))
    axes.set_ylabel("slot")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_waits(axes: Axes, run: BatchingRun) -> None:
    by_index = sorted(run.bars, key=lambda bar: bar.index)
    for first in range(0, len(by_index), run.num_slots):
        batch = by_index[first : first + run.num_slots]
        batch_end_s = max(bar.end_s for bar in batch)
        for bar in batch:
            wait_s = batch_end_s - bar.end_s
            axes.barh(bar.slot, wait_s, 0.84, left=bar.end_s, color=_WAIT_COLOR, lw=0, zorder=0)
        axes.axvline(batch_end_s, color="#999999", lw=0.8, ls=(0, (4, 3)), zorder=0)
