"""How fast is a whole model on this GPU, compared with transformers?

    python -m benchmarks.compare_torch --platform gpu

measures Qwen3-0.6B and Llama-3.1-8B in bfloat16 with random weights in their published shapes. Each
engine draws its weights on the device, so tokens differ between engines and nothing is downloaded.

    throughput     256 requests of 32 to 512 tokens that want 16 to 256 more, all at once: paxkv's
                   engine and transformers' continuous batching
    decode         steps of 64, 256 and 1 requests after 512 tokens
    first token    of one prompt of 512 and of 2,048 tokens

Each engine and model has a process of its own. Each figure is appended to --out at once; the report
is written next to it with the suffix .md. The run ends within --time-limit, and --resume continues
it.
"""

import argparse
import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare_torch.gpu_subject import FULL, MODEL_CONFIGS, REHEARSAL, Subject
from benchmarks.ops.gpu_report import problem_lines
from benchmarks.tables import markdown_table
from benchmarks.units.run import UnitRun, add_run_arguments
from benchmarks.units.unit import Measured, Result, Unit

BENCHMARK = "benchmarks.compare_torch"
PAXKV, TRANSFORMERS = "paxkv", "transformers"
SUBJECTS = {PAXKV: "PaxkvModel", TRANSFORMERS: "TransformersModel"}


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    """The units of all processes, in the order of their worth."""
    sizes = REHEARSAL if is_rehearsal else FULL
    # Case -> method of `Subject` and its arguments.
    cases: dict[str, tuple[str, tuple[int, ...]]] = {
        "throughput": ("throughput", ()),
        **{f"decode, {num} requests": ("decode", (num,)) for num in sizes.decode_batches},
        **{f"first token, prompt {n}": ("first_token", (n,)) for n in sizes.first_token_prompts},
    }
    return [
        Unit(
            kind="time",
            op=model,
            case=case,
            body=engine,
            measure=functools.partial(_measure, model, engine, is_rehearsal, method, arguments),
        )
        for model in MODEL_CONFIGS
        for engine in (PAXKV, TRANSFORMERS)
        for case, (method, arguments) in cases.items()
    ]


def _measure(
    model: str,
    engine: str,
    is_rehearsal: bool,
    method: str,
    arguments: tuple[int, ...],
    seed: int,
) -> Measured:
    return getattr(_load_subject(model, engine, is_rehearsal), method)(*arguments, seed)


@functools.cache
def _load_subject(model: str, engine: str, is_rehearsal: bool) -> Subject:
    """One per process; its units share its programs."""
    # Imported by the unit's process: a machine without torch or transformers measures paxkv alone.
    module = importlib.import_module(f"{BENCHMARK}.gpu_{engine}")
    return getattr(module, SUBJECTS[engine])(model, is_rehearsal)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {BENCHMARK} --platform gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run_arguments(parser)
    run = UnitRun(
        parser.parse_args(argv),
        benchmark=BENCHMARK,
        list_units=all_units,
        group_key=lambda unit: (unit.op, unit.body),
    )
    return run.run(report)


def report(rows: Sequence[Mapping[str, Any]], results: Sequence[Result], device: str) -> str:
    """Markdown: a table per model with a column per engine, and paxkv's ratio to transformers."""
    parts = [f"# Whole models on {device}", "Weights are random."]
    # Model -> case and metric -> engine -> median.
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        _, model, case, engine = row["unit"].split("|")
        if "median" in row:
            of_model = cells.setdefault(model, {})
            of_model.setdefault(f"{case}: {row['metric']}", {})[engine] = row["median"]
    for model, of_model in cells.items():
        lines = []
        for name, medians in of_model.items():
            ours, theirs = medians.get(PAXKV), medians.get(TRANSFORMERS)
            ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
            lines.append([name, *(f"{x:,.2f}" if x else "" for x in (ours, theirs)), ratio])
        head = ["case", PAXKV, TRANSFORMERS, "paxkv / transformers"]
        parts += [f"## {model}", markdown_table(head, lines)]
    if problems := problem_lines(results):
        parts += ["## Problems", "\n".join(problems)]
    return "\n\n".join(parts)
