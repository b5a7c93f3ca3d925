"""Formats tables, numbers, spreads and names of cases for benchmarks."""

import re
import statistics
from collections.abc import Sequence


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def written(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([written(head), written(rule), *map(written, lines)])


def case_fields(case: str) -> list[str]:
    """ "hash runs=[1, 2] size=3" -> ["hash", "runs=[1, 2]", "size=3"]."""
    return re.split(r" (?=\w+=)", case)


def short_cases(cases: Sequence[str]) -> tuple[str, list[str]]:
    """The fields that all cases share, and the other fields of each case."""
    fields = [case_fields(case) for case in cases]
    common = set(fields[0]).intersection(*fields)
    left = [" ".join(f for f in of_case if f not in common) for of_case in fields]
    return " ".join(f for f in fields[0] if f in common), left


def number(value: float) -> str:
    """Formats a number with at least three digits: 12.345 -> 12.3, and 12345.6 -> 12,346."""
    if value == 0 or abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """ "median (least to most)", or one number if all values are equal."""
    middle = number(statistics.median(values))
    if min(values) == max(values):
        return middle
    return f"{middle} ({number(min(values))} to {number(max(values))})"
