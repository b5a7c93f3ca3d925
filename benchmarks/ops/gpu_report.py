"""The report of the GPU half: checks per op and body, failures, and timings with their rates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import markdown_table

# Reading is somewhat faster than copying. A body above this share did less work than was counted.
# Inputs smaller than `MIN_BYTES_OF_MEMORY` may be in a cache, so they are not checked.
MAX_SHARE_OF_COPY = 1.3
MIN_BYTES_OF_MEMORY = 2**28
_MAX_REASON_CHARS = 260


def report(rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """Builds the report in Markdown.

    Args:
        rows: Rows of all units, including earlier runs.
        device: Its name, for the title.
    """
    ceilings = device_rates(rows)
    rates = [f"- {name.replace('_', ' ')}: {value:,.0f}" for name, value in ceilings.items()]
    parts = [
        f"# Figures of {device}",
        "\n".join(rates or ["The device's rates were not measured."]),
    ]
    parts += ["## Checks", check_table(rows)]
    if problems := problem_lines(rows):
        parts += ["## Problems", "\n".join(problems)]
    parts += ["## Timings of ops", timing_table(rows, ceilings)]
    return "\n\n".join(parts)


def device_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`copy_gb_per_s` and `matmul_tflop_per_s`, where measured."""
    names = ("copy_gb_per_s", "matmul_tflop_per_s")
    return {row["metric"]: row["median"] for row in rows if row["metric"] in names}


def check_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per op and body: the number of checks that were right, and the worst error."""
    families: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        kind, op, _, body = row["unit"].split("|")
        if kind == "check":
            families[op, body].append(row)
    lines = []
    for (op, body), family in families.items():
        outcomes = ["wrong" if row.get("is_right") is False else row["outcome"] for row in family]
        errors = [row["median"] for row in family if "median" in row]
        others = [
            f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes) if name != "done"
        ]
        right = f"{outcomes.count('done')} of {len(family)}"
        worst = f"{max(errors):.1e}" if errors else ""
        lines.append([op, body, right, ", ".join(others), worst])
    return markdown_table(["op", "body", "right", "others", "worst error"], lines)


def problem_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per unit that is wrong, failed or died, and a line per reason for absent units."""
    lines, absent = [], defaultdict(list)
    for unit, row in {row["unit"]: row for row in rows}.items():
        if row.get("is_right") is False:
            lines.append(f"- WRONG {unit}: {'; '.join(row['wrong'])}")
        elif row["outcome"] in ("failed", "died"):
            lines.append(f"- {row['outcome'].upper()} {unit}: {_short(row['reason'])}")
        elif row["outcome"] == "absent":
            absent[unit.rpartition("|")[2], _short(row["reason"])].append(unit)
    for (body, reason), of_reason in absent.items():
        lines.append(f"- absent: {len(of_reason)} units of {body}: {reason}")
    return lines


def timing_table(rows: Sequence[Mapping[str, Any]], ceilings: Mapping[str, float]) -> str:
    """The timings. Bodies of the same case are in adjacent lines."""
    timings = [row for row in rows if row["metric"] == "call_ms"]
    order = list(dict.fromkeys(row["unit"].rpartition("|")[0] for row in timings))
    timings.sort(key=lambda row: order.index(row["unit"].rpartition("|")[0]))
    head = ["op, case, body", "ms", "GB/s", "TFLOP/s", "% of copy", "% of matmul", ""]
    return markdown_table(head, [_timing_line(row, ceilings) for row in timings])


def _timing_line(row: Mapping[str, Any], ceilings: Mapping[str, float]) -> list[str]:
    gb_per_s = row["num_bytes"] / row["median"] / 1e6
    tflop_per_s = row["num_flops"] / row["median"] / 1e9
    copy, matmul = ceilings.get("copy_gb_per_s"), ceilings.get("matmul_tflop_per_s")
    is_large = row["num_bytes"] >= MIN_BYTES_OF_MEMORY
    is_too_fast = copy is not None and is_large and gb_per_s > MAX_SHARE_OF_COPY * copy
    return [
        row["case"],
        f"{row['median']:.4f}",
        f"{gb_per_s:,.0f}",
        f"{tflop_per_s:,.0f}" if row["num_flops"] else "",
        f"{100 * gb_per_s / copy:.0f}" if copy else "",
        f"{100 * tflop_per_s / matmul:.0f}" if matmul and row["num_flops"] else "",
        "TOO FAST TO BE TRUE" if is_too_fast else "",
    ]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON_CHARS else f"...{text[-_MAX_REASON_CHARS:]}"
