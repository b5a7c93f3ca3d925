"""Draws waste by length distribution and scheme, beside what the reference documents say."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

# Contiguous schemes in warm colours, paging in cold ones.
_CONTIGUOUS_COLORS = ("#b2452f", "#df8a5b", "#efc49a")
# As many as there are sizes of blocks.
_PAGED_COLORS = ("#1b5e8c", "#6aaed6", "#123c5a", "#b5d7ec", "#3d86b8", "#92a8b8")
_BAR_INCHES = 0.19
_MAX_LEGEND_COLUMNS = 5
# Waste in percent that the reference documents give.
_TRADITIONAL_RANGE = (60, 80)
_PAGED_LIMIT = 4


def draw_memory(
    figures: Mapping[str, Mapping[str, Sequence[float]]], schemes: Sequence[str], file: Path
) -> None:
    """Writes a PNG: a group of bars for each distribution, a bar for each scheme.

    Args:
        figures: Distribution -> name -> a value a seed; `schemes` and "memory" are drawn.
    """
    figure = Figure(
        figsize=(12, 1.9 + _BAR_INCHES * len(schemes) * len(figures)), layout="constrained"
    )
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    colors = _colors(schemes)
    height = 0.8 / len(schemes)
    for row, by_name in enumerate(figures.values()):
        for bar, scheme in enumerate(schemes):
            y = row - 0.4 + (bar + 0.5) * height
            value = statistics.median(by_name[scheme])
            label = scheme if row == 0 else None
            left.barh(y, value, 0.92 * height, color=colors[scheme], label=label)
            left.text(value + 0.8, y, f"{value:.1f}", va="center", fontsize=8, color="#333333")
        memory = statistics.median(by_name["memory"])
        right.barh(row, memory, 0.5, color=_PAGED_COLORS[0])
        right.text(memory + 1.5, row, f"{memory:.0f} %", va="center", fontsize=9)
    low, high = _TRADITIONAL_RANGE
    left.axvspan(low, high, color="#b2452f", alpha=0.10, lw=0, zorder=0)
    left.axvspan(0, _PAGED_LIMIT, color="#1b5e8c", alpha=0.14, lw=0, zorder=0)
    top = left.get_xaxis_transform()
    left.text((low + high) / 2, 1.01, "reference:\n60 to 80 %", transform=top, **_NOTE)
    left.text(_PAGED_LIMIT / 2, 1.01, "reference:\n< 4 %", transform=top, **_NOTE)
    left.set_xlabel("allocated KV positions that hold no token, %")
    # Room for the numbers behind the bars.
    left.set_xlim(0, 106)
    left.set_yticks(range(len(figures)), list(figures), fontsize=11)
    left.invert_yaxis()
    right.set_xlabel("paged memory, % of\ncontiguous max_model_len")
    right.set_xlim(0, 125)
    right.set_xticks(range(0, 101, 25))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.legend(
        loc="outside lower center", ncols=min(len(schemes), _MAX_LEGEND_COLUMNS), frameon=False
    )
    figure.suptitle("KV memory that holds nothing, by length of prompts and outputs", fontsize=13)
    figure.savefig(file, dpi=130)


_NOTE = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "#555555"}


def _colors(schemes: Sequence[str]) -> dict[str, str]:
    contiguous = [scheme for scheme in schemes if not scheme.startswith("paged")]
    paged = [scheme for scheme in schemes if scheme.startswith("paged")]
    return {
        **dict(zip(contiguous, _CONTIGUOUS_COLORS, strict=False)),
        **dict(zip(paged, _PAGED_COLORS, strict=False)),
    }
