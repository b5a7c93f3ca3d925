"""Result rows and a Markdown report of loads."""

import argparse
from collections.abc import Sequence

from benchmarks.result_rows import ResultRow
from benchmarks.serve.summary import LATENCIES, STATISTICS, LoadSummary
from benchmarks.tables import markdown_table, number

_NUM_SHOWN_ERRORS = 5


def result_rows(arguments: argparse.Namespace, summaries: Sequence[LoadSummary]) -> list[ResultRow]:
    """One row per figure that all repetitions have."""
    names = [name for name in summaries[0].figures if all(name in s.figures for s in summaries)]
    return [
        ResultRow(
            benchmark="benchmarks.serve",
            case=_describe_case(arguments),
            metric=name,
            values=[summary.figures[name] for summary in summaries],
            device=arguments.device,
        )
        for name in names
    ]


def _describe_case(arguments: argparse.Namespace) -> str:
    names = ["model", "dataset", "num_prompts", "request_rate", "max_concurrency", "ignore_eos"]
    if arguments.dataset == "sharegpt":
        names += ["sharegpt_output_len", "sharegpt_max_len"]
    else:
        names += ["random_input_len", "random_output_len", "random_range_ratio"]
    if arguments.dataset == "shared-prefix":
        names += ["shared_prefix_len", "num_prefixes"]
    case = " ".join(f"{name}={getattr(arguments, name)}" for name in names)
    bounds = "".join(f" {name}<={bound_ms:g}ms" for name, bound_ms in arguments.goodput)
    return f"{case} seed={arguments.seed}{bounds}"


def report(rows: Sequence[ResultRow], summaries: Sequence[LoadSummary]) -> str:
    """Two Markdown tables, how tokens were counted, and the failures.

    With several repetitions, each figure is their median.
    """
    medians = {row.metric: row.median for row in rows}
    lines = [rows[0].case, ""]
    if len(summaries) > 1:
        lines += [f"Medians of {len(summaries)} repetitions.", ""]
    of_tables = {f"{name}_{statistic}" for name in LATENCIES for statistic in STATISTICS}
    figures = [[name, number(v)] for name, v in medians.items() if name not in of_tables]
    lines.append(markdown_table(["all requests", "value"], figures))
    latencies = [
        [LATENCIES[name], *(number(medians[f"{name}_{statistic}"]) for statistic in STATISTICS)]
        for name in LATENCIES
        if f"{name}_p50" in medians
    ]
    if latencies:
        lines += ["", markdown_table(["ms", *STATISTICS], latencies)]
    return "\n".join([*lines, "", *_notes(summaries)])


def _notes(summaries: Sequence[LoadSummary]) -> list[str]:
    lines = []
    for repetition, summary in enumerate(summaries):
        name = f"Repetition {repetition}: " if len(summaries) > 1 else ""
        counted = " and ".join(
            f"{'the usage that the server sent' if by == 'usage' else 'pieces of the stream'} "
            f"({num_requests} requests)"
            for by, num_requests in summary.counted_by.items()
        )
        if counted:
            lines.append(f"{name}Output tokens are counted by {counted}.")
        if summary.num_ended_early:
            lines.append(
                f"{name}Outputs shorter than requested: {summary.num_ended_early}; pass "
                "--ignore-eos if the server supports it."
            )
        if summary.num_failed:
            lines.append(f"{name}{summary.num_failed} of {summary.num_requests} requests FAILED:")
            errors = list(summary.errors.items())
            lines += [f"    {count} x {error}" for error, count in errors[:_NUM_SHOWN_ERRORS]]
            if len(errors) > _NUM_SHOWN_ERRORS:
                lines.append(f"    and {len(errors) - _NUM_SHOWN_ERRORS} other errors")
    return lines
