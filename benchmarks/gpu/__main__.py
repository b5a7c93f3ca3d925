"""Checks whether paxkv works on this GPU, and measures its speed.

    python -m benchmarks.gpu

runs these units, the most important first:

    device          memory bandwidth and a matrix product
    first checks    one case of each op against float64, with the Mosaic kernel and by default
    demo model      the engine must give the right answers with the Mosaic kernels and without
    other checks    all other cases of the Mosaic kernels against float64
    timings         every op at full size, Mosaic and XLA
    paxkv           Llama-3.1-8B and Qwen3-0.6B in bfloat16 with random weights in their published
                    shapes: 256 requests at once, with prompts of 32 to 512 tokens and outputs of 16
                    to 256; decode steps of 64, 256 and 1 requests after 512 tokens; time to the
                    first token of one prompt of 512 and of 2,048 tokens
    transformers    the same models, with transformers' continuous batching for the throughput
    XLA             the XLA body of every op against float64

Units run in worker processes with a time limit, so a crash or a hang costs only one unit. Each
result is appended to --out immediately. The report is written next to it, as gpu.gpu.md next to
gpu.jsonl. The run ends within --time-limit and lists the units that are left. The same command with
the same --out runs the units that have no result yet. `python -m benchmarks.ops --platform gpu`
runs only the units of the ops, with the same rows.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.command_line import run_benchmark
from benchmarks.gpu.units import PAXKV, TRANSFORMERS, all_units, process_key
from benchmarks.ops import gpu_report
from benchmarks.tables import markdown_table
from benchmarks.units.run import UnitRun, add_run_arguments

BENCHMARK = "benchmarks.gpu"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {BENCHMARK}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run_arguments(parser)
    run = UnitRun(
        parser.parse_args(argv), benchmark=BENCHMARK, list_units=all_units, group_key=process_key
    )
    return run.run(report)


def report(rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """Markdown: the report of the ops, then a table per model."""
    return "\n\n".join([gpu_report.report(rows, device), *model_sections(rows)])


def model_sections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: a table per model with a column per engine, and paxkv's ratio to transformers."""
    # Model -> case and metric -> engine -> median.
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        _, model, case, engine = row["unit"].split("|")
        if "median" in row and engine in (PAXKV, TRANSFORMERS):
            of_model = cells.setdefault(model, {})
            of_model.setdefault(f"{case}: {row['metric']}", {})[engine] = row["median"]
    parts = []
    for model, of_model in cells.items():
        lines = []
        for name, medians in of_model.items():
            ours, theirs = medians.get(PAXKV), medians.get(TRANSFORMERS)
            ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
            lines.append([name, *(f"{x:,.2f}" if x else "" for x in (ours, theirs)), ratio])
        head = ["case", PAXKV, TRANSFORMERS, "paxkv / transformers"]
        parts += [f"## {model} with random weights", markdown_table(head, lines)]
    return parts


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
