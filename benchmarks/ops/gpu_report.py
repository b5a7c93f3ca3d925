"""From results to figures, to rows of a file, and to the table that is printed at the end."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ops.gpu_attention_speed import MIXED_CASE, MIXED_PARTS
from benchmarks.ops.gpu_processes import Result
from benchmarks.ops.gpu_timing import spread
from benchmarks.ops.gpu_units import Finding, Wanted
from benchmarks.result_rows import ResultRow

BENCHMARK = "benchmarks.ops"
# Together, a mixed batch may take so much longer than its parts one after the other.
MIXED_LIMIT = 1.15
_REASON_LENGTH = 260
_NUM_LISTED = 20
# Reading alone is somewhat faster than copying. Nothing is twice as fast.
_PLAUSIBLE_SHARE = 1.3
_LARGE_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device did in the same run; None where it was not measured."""

    copy_bytes_per_s: float | None = None
    flops_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow(ResultRow):
    """A figure and what belongs to it; or, without values, why there is none."""

    details: dict[str, Any]
    commit: str | None

    def as_dict(self) -> dict[str, object]:
        # Something to take the median of; it does not reach the file.
        shown = self if self.values else OpRow(**{**_fields(self), "values": (math.nan,)})
        row = ResultRow.as_dict(shown)
        if not self.values:
            row = {k: v for k, v in row.items() if k not in ("median", "min", "max")}
            row["num_repetitions"] = 0
        if self.commit is not None:
            row["commit"] = self.commit
        return {**row, **self.details}


def _fields(row: OpRow) -> dict[str, Any]:
    names = ("benchmark", "case", "metric", "values", "device", "details", "commit")
    return {name: getattr(row, name) for name in names}


def ceilings_of(results: Sequence[Result]) -> Ceilings:
    """The better of the two ways to copy, and the matrix product."""
    copies, products = [], []
    for result in results:
        if result.unit.kind == "machine" and result.outcome == "done":
            seconds = statistics.median(result.fields["samples_s"])
            if result.unit.body in ("copy", "add_one"):
                copies.append(result.unit.num_bytes / seconds)
            elif result.unit.body == "matmul":
                products.append(result.unit.num_flops / seconds)
    return Ceilings(
        copy_bytes_per_s=max(copies, default=None), flops_per_s=max(products, default=None)
    )


def findings_of(result: Result) -> list[Finding]:
    return [Finding(**finding) for finding in result.fields.get("findings", ())]


def is_wrong(result: Result) -> bool:
    """Whether something was computed and is not right."""
    return not all(finding.is_right for finding in findings_of(result))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a timing means."""

    median_s: float
    p10_s: float
    p90_s: float
    bytes_per_s: float
    flops_per_s: float
    copy_share: float | None
    matrix_share: float | None
    floor_share: float | None  # the time that the two ceilings leave, over the time taken
    verdict: str


def figures_of(result: Result, ceilings: Ceilings) -> Figures:
    """The figures of a timing that was done."""
    unit, seconds = result.unit, result.fields["samples_s"]
    median_s = statistics.median(seconds)
    p10_s, p90_s = spread(seconds)
    bytes_per_s, flops_per_s = unit.num_bytes / median_s, unit.num_flops / median_s
    copy_share = _ratio(bytes_per_s, ceilings.copy_bytes_per_s)
    matrix_share = _ratio(flops_per_s, ceilings.flops_per_s)
    shares = [share for share in (copy_share, matrix_share) if share is not None]
    return Figures(
        median_s=median_s,
        p10_s=p10_s,
        p90_s=p90_s,
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        copy_share=copy_share,
        matrix_share=matrix_share,
        floor_share=max(shares) if len(shares) == 2 else None,
        verdict=_verdict(
            unit.wanted,
            {
                "copy_share": copy_share,
                "floor_share": max(shares) if len(shares) == 2 else None,
                "tflops": flops_per_s / 1e12,
                "us": median_s * 1e6,
            },
        ),
    )


def is_implausible(result: Result, figures: Figures) -> bool:
    """Whether less was done than was counted: what does not fit a cache is read from memory."""
    is_large = result.unit.num_bytes >= _LARGE_BYTES
    shares = (figures.copy_share if is_large else None, figures.matrix_share)
    return any(share is not None and share > _PLAUSIBLE_SHARE for share in shares)


def _ratio(value: float, ceiling: float | None) -> float | None:
    return None if ceiling is None else value / ceiling


def _verdict(wanted: Wanted | None, figures: dict[str, float | None]) -> str:
    if wanted is None:
        return ""
    figure = figures[wanted.figure]
    if figure is None:
        return "no ceiling measured"
    is_met = [
        figure <= value if wanted.is_lower_better else figure >= value for value in wanted.values
    ]
    return " ".join("met" if met else "missed" for met in is_met)


def wanted_text(wanted: Wanted | None) -> str:
    if wanted is None:
        return ""
    form = {
        "copy_share": ("{:.0%}", " of copy"),
        "floor_share": ("{:.0%}", " of floor"),
        "tflops": ("{:.0f}", " TFLOP/s"),
        "us": ("< {:.0f}", " us"),
    }[wanted.figure]
    return ", ".join(form[0].format(value) for value in wanted.values) + form[1]


def row_of(result: Result, ceilings: Ceilings, device: str, commit: str | None) -> OpRow:
    """A line of the result file for a unit, whatever became of it."""
    unit = result.unit
    details: dict[str, Any] = {
        "op": unit.op,
        "body": unit.body,
        "outcome": result.outcome,
        "seed": result.fields.get("seed"),
        "findings": [
            # JSON has no NaN.
            {"what": f.what, "error": None if math.isnan(f.error) else f.error, "limit": f.limit}
            for f in findings_of(result)
        ],
    }
    values: Sequence[float] = ()
    if result.outcome != "done":
        details["reason"] = result.reason
    elif unit.kind == "check":
        details["is_right"] = not is_wrong(result)
        values = [f.error for f in findings_of(result) if not math.isnan(f.error)][:1]
    else:
        values = [seconds * 1e3 for seconds in result.fields["samples_s"]]
        figures = figures_of(result, ceilings)
        details |= {
            "p10": figures.p10_s * 1e3,
            "p90": figures.p90_s * 1e3,
            "gb_per_s": figures.bytes_per_s / 1e9,
            "tflop_per_s": figures.flops_per_s / 1e12,
            "share_of_copy": figures.copy_share,
            "share_of_matmul": figures.matrix_share,
            "measured_copy_gb_per_s": _scaled(ceilings.copy_bytes_per_s, 1e9),
            "measured_matmul_tflop_per_s": _scaled(ceilings.flops_per_s, 1e12),
            "wanted": wanted_text(unit.wanted),
            "verdict": figures.verdict,
            "method": result.fields["method"],
            "peer_version": result.fields.get("peer_version"),
            "is_right": not is_wrong(result),
        }
    return OpRow(
        benchmark=BENCHMARK,
        case=f"{unit.op}, {unit.case}, {unit.body}",
        metric="relative_error" if unit.kind == "check" else "call_ms",
        values=values,
        device=device,
        details=details,
        commit=commit,
    )


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def machine_lines(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in results:
        if result.unit.kind == "machine" and result.outcome == "done":
            seconds = statistics.median(result.fields["samples_s"])
            rate = (
                f"{result.unit.num_bytes / seconds / 1e9:,.0f} GB/s"
                if result.unit.num_bytes
                else f"{result.unit.num_flops / seconds / 1e12:,.0f} TFLOP/s"
            )
            lines.append(f"{result.unit.body} ({result.unit.case}): {rate}")
    return lines


def check_lines(results: Sequence[Result]) -> list[str]:
    """One line an op and body: how many checks, how many right, the worst error."""
    by_family: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.unit.kind == "check":
            by_family[result.unit.op, result.unit.body].append(result)
    lines = []
    for (op, body), family in by_family.items():
        done = [result for result in family if result.outcome == "done"]
        counts = [f"{sum(not is_wrong(result) for result in done)} of {len(family)} right"]
        for name, count in (
            ("WRONG", sum(map(is_wrong, done))),
            *((o.upper() if o in ("failed", "died") else o, sum(r.outcome == o for r in family))
              for o in ("failed", "died", "absent", "skipped")),
        ):  # fmt: skip
            counts += [f"{count} {name}"] if count else []
        errors = [f.error for r in done for f in findings_of(r)[:1] if f.limit > 0]
        worst = f", worst error {max(errors):.1e}" if errors else ""
        lines.append(f"{op} {body}: {', '.join(counts)}{worst}")
    return lines


def failure_lines(results: Sequence[Result]) -> list[str]:
    """What failed, died or came out wrong; and once each, what is absent or was skipped."""
    lines, absent = [], defaultdict(list)
    for result in results:
        unit = result.unit
        name = f"{unit.kind} {unit.op} / {unit.case} / {unit.body}"
        if result.outcome in ("failed", "died"):
            lines.append(f"{result.outcome.upper()} {name}: {_short(result.reason)}")
        elif result.outcome == "done" and is_wrong(result):
            wrong = [f for f in findings_of(result) if not f.is_right]
            text = "; ".join(f"{f.what} {f.error:.2g} (limit {f.limit:.0e})" for f in wrong)
            lines.append(f"WRONG {name}: {text}")
        elif result.outcome in ("absent", "skipped"):
            kept = unit.body if result.outcome == "absent" else ""
            absent[result.outcome, unit.kind, unit.op, kept, _short(result.reason)].append(unit)
    hidden = len(lines) - _NUM_LISTED
    lines = lines[:_NUM_LISTED] + ([f"... and {hidden} more, in the file"] if hidden > 0 else [])
    for (outcome, kind, op, body, reason), units in absent.items():
        lines.append(f"{outcome}: {len(units)} x {kind} {op} {body}: {reason}")
    return lines


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _REASON_LENGTH else f"...{text[-_REASON_LENGTH:]}"


TABLE_HEAD = (
    "| op | case | body | ms | p10-p90 | GB/s | TFLOP/s | copy | matmul | wanted | |",
    "|---|---|---|--:|--:|--:|--:|--:|--:|---|---|",
)


def table_lines(results: Sequence[Result], ceilings: Ceilings) -> list[str]:
    """The timings, the bodies of one case below each other."""
    timings = [result for result in results if result.unit.kind == "time"]
    cases = list(dict.fromkeys((r.unit.op, r.unit.case) for r in timings))
    lines = list(TABLE_HEAD)
    for op, case in cases:
        lines += [
            _table_line(result, ceilings)
            for result in timings
            if (result.unit.op, result.unit.case) == (op, case) and result.outcome == "done"
        ]
    return lines


def _table_line(result: Result, ceilings: Ceilings) -> str:
    unit, figures = result.unit, figures_of(result, ceilings)
    verdict = [
        figures.verdict if unit.is_ours else "",
        "WRONG" if is_wrong(result) else "",
        "TOO FAST TO BE TRUE" if is_implausible(result, figures) else "",
    ]
    cells = (
        unit.op,
        unit.case,
        unit.body,
        _number(figures.median_s * 1e3),
        f"{_number(figures.p10_s * 1e3)}-{_number(figures.p90_s * 1e3)}",
        f"{figures.bytes_per_s / 1e9:,.0f}",
        f"{figures.flops_per_s / 1e12:,.0f}" if unit.num_flops else "",
        _percent(figures.copy_share),
        _percent(figures.matrix_share) if unit.num_flops else "",
        wanted_text(unit.wanted) if unit.is_ours else "",
        " ".join(word for word in verdict if word),
    )
    return f"| {' | '.join(cells)} |"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.4f}" if milliseconds < 0.1 else f"{milliseconds:.3f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def mixed_lines(results: Sequence[Result]) -> list[str]:
    """The mixed batch against its parts, for each body that did all three."""
    seconds: dict[tuple[str, str], float] = {
        (r.unit.body, r.unit.case): statistics.median(r.fields["samples_s"])
        for r in results
        if r.unit.kind == "time" and r.unit.op == "paged_attention" and r.outcome == "done"
    }
    lines = []
    for body in dict.fromkeys(body for body, _ in seconds):
        cases = [(body, case) for case in (MIXED_CASE, *MIXED_PARTS)]
        if all(case in seconds for case in cases):
            together, *parts = (seconds[case] for case in cases)
            ratio = together / sum(parts)
            verdict = "met" if ratio <= MIXED_LIMIT else "missed"
            lines.append(
                f"{MIXED_CASE}, {body}: {ratio:.2f} x its parts run apart "
                f"(wanted at most {MIXED_LIMIT}: {verdict})"
            )
    return lines


def is_compile_failure(result: Result) -> bool:
    """Whether a unit did not compile, or compiled to what would not be a measurement."""
    if result.outcome == "done":
        return bool(result.fields["num_hoisted"] or _copies_cache(result))
    return result.outcome in ("failed", "died")


def _copies_cache(result: Result) -> bool:
    # XLA's own attention may copy what it likes; what we time of ours must not copy a cache.
    unit = result.unit
    return bool(unit.kind == "time" and unit.body == "mosaic_gpu" and result.fields["large_copies"])


def compile_line(result: Result) -> str:
    if result.outcome != "done":
        return f"{result.outcome:8} {result.unit.key}: {_short(result.reason)}"
    fields = result.fields
    notes = [
        f"{fields['num_hoisted']} KERNELS OUTSIDE THE LOOP" if fields["num_hoisted"] else "",
        f"copies {', '.join(fields['large_copies'])}" if fields["large_copies"] else "",
    ]
    return (
        f"{'BAD' if is_compile_failure(result) else 'compiled':8} {result.unit.key}: "
        f"{fields['took_s']:.1f} s, {fields['num_mosaic_kernels']} Mosaic kernels, "
        f"{fields['argument_mib']:,} MiB in, {fields['temp_mib']:,} MiB temporary"
        f"{''.join(f', {note}' for note in notes if note)}"
    )


def compile_summary(results: Sequence[Result]) -> list[str]:
    """How many units of each body compiled, and again which did not."""
    by_body: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_body[result.unit.body].append(result)
    lines = [""]
    for body, of_body in by_body.items():
        outcomes = [r.outcome if r.outcome != "done" else "compiled" for r in of_body]
        counts = ", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes))
        lines.append(f"{body}: {counts}")
    bad = [compile_line(result) for result in results if is_compile_failure(result)]
    return lines + [f"{len(bad)} of {len(results)} units failed:" if bad else "all well", *bad]
