"""Draws starts as bars of their phases, one bar a kind of start."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

_COLORS = ("#9aa5b1", "#4c8fbf", "#c4573a", "#e3b04b", "#5a9e6f")


def draw_starts(
    figures: Mapping[str, Mapping[str, Sequence[float]]], milestones: Sequence[str], file: Path
) -> None:
    """Writes a PNG. A phase is the time from the milestone before it, medians of both.

    Args:
        figures: Kind of start -> milestone -> seconds since the start, one a repetition.
    """
    figure = Figure(figsize=(11, 1.9 + 0.75 * len(figures)), layout="constrained")
    axes = figure.subplots()
    medians = {
        start: [statistics.median(by_name[name]) for name in milestones]
        for start, by_name in figures.items()
    }
    longest_s = max(ends_s[-1] for ends_s in medians.values())
    for row, ends_s in enumerate(medians.values()):
        begin_s = 0.0
        for name, end_s, color in zip(milestones, ends_s, _COLORS, strict=True):
            label = name if row == 0 else None
            axes.barh(row, end_s - begin_s, 0.6, left=begin_s, color=color, label=label)
            if end_s - begin_s > 0.035 * longest_s:
                middle_s = (begin_s + end_s) / 2
                axes.text(middle_s, row, f"{end_s - begin_s:.1f}", **_INSIDE)
            begin_s = end_s
        axes.text(begin_s + 0.008 * longest_s, row, f"{begin_s:.1f} s", va="center", fontsize=11)
    axes.set_yticks(range(len(figures)), list(figures), fontsize=12)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * longest_s)
    axes.set_xlabel("seconds since the process started")
    axes.set_title("From the start of the server to its first token", loc="left", fontsize=13)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=len(milestones), frameon=False)
    figure.savefig(file, dpi=130)


_INSIDE = {"ha": "center", "va": "center", "fontsize": 9, "color": "white"}
