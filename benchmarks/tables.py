"""`markdown_table`: how every benchmark prints its figures."""

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
