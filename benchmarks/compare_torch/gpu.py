"""How fast is a whole model on this GPU, compared with transformers?

    python -m benchmarks.compare_torch --platform gpu

measures Qwen3-0.6B and Llama-3.1-8B in bfloat16 with random weights in their published shapes. Each
engine draws its weights on the device, so tokens differ between engines and nothing is downloaded.

    throughput     256 requests of 32 to 512 tokens that want 16 to 256 more, all at once: paxkv's
                   engine and transformers' continuous batching
    decode         steps of 64, 256 and 1 requests after 512 tokens: time, tokens/s, and the share
                   of the roofline (the bytes of weights, keys and values that a step must read,
                   over the copy bandwidth measured in the same run)
    first token    of one prompt of 512 and of 2,048 tokens
    kernels        paxkv's decode and first token again with --kernels xla

Each engine and model has a process and a time limit of its own. Each figure is appended to --out at
once; the report goes beside it with the suffix .md. The run ends within --time-limit, and --resume
continues it.
"""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare_torch.gpu_sizes import MODEL_CONFIGS, sizes_of
from benchmarks.ops.gpu_report import device_rates, problem_lines
from benchmarks.ops.machine import machine_units
from benchmarks.tables import markdown_table
from benchmarks.units.run import Stage, UnitRun, add_run_arguments
from benchmarks.units.unit import Measured, Unit

BENCHMARK = "benchmarks.compare_torch"
LISTED_BY = "benchmarks.compare_torch.gpu:all_units"
PAXKV, PAXKV_XLA, TRANSFORMERS = "paxkv", "paxkv, --kernels xla", "transformers"
# Model, engine and the most seconds of its process, in the order of their worth.
GROUPS = (
    ("llama-3.1-8b", PAXKV, 200.0),
    ("llama-3.1-8b", TRANSFORMERS, 90.0),
    ("qwen3-0.6b", PAXKV, 150.0),
    ("qwen3-0.6b", TRANSFORMERS, 60.0),
    ("qwen3-0.6b", PAXKV_XLA, 60.0),
    ("llama-3.1-8b", PAXKV_XLA, 90.0),
)
# Loading and compiling are silent.
_SILENCE_LIMIT_S = 180.0


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    units = machine_units(is_rehearsal=is_rehearsal)
    for model, engine, _ in GROUPS:
        units += units_of(model, engine, is_rehearsal=is_rehearsal)
    return units


def units_of(model: str, engine: str, *, is_rehearsal: bool) -> list[Unit]:
    """The units of one process."""
    sizes = sizes_of(is_rehearsal=is_rehearsal)
    cases: list[tuple[str, str, tuple[int, ...]]] = [("load", "load", ())]
    batches, prompts = sizes.decode_batches, sizes.first_token_prompts
    if engine == PAXKV_XLA:
        batches, prompts = batches[:1], prompts[-1:]
    else:
        cases.append(("throughput", "throughput", ()))
    cases += [(f"decode, {num_reqs} requests", "decode", (num_reqs,)) for num_reqs in batches]
    cases += [(f"first token, prompt {n}", "first_token", (n,)) for n in prompts]
    return [
        Unit(
            kind="time",
            op=model,
            case=case,
            body=engine,
            measure=lambda seed, method=method, arguments=arguments: _measure(
                model, engine, method, arguments, seed, is_rehearsal=is_rehearsal
            ),
            silence_limit_s=_SILENCE_LIMIT_S,
        )
        for case, method, arguments in cases
    ]


def _measure(
    model: str,
    engine: str,
    method: str,
    arguments: tuple[int, ...],
    seed: int,
    *,
    is_rehearsal: bool,
) -> Measured:
    # Imported by the unit's process: a machine without torch or transformers measures paxkv alone.
    if engine == TRANSFORMERS:
        module = importlib.import_module("benchmarks.compare_torch.gpu_transformers")
        subject = module.transformers_model(model, is_rehearsal)
    else:
        module = importlib.import_module("benchmarks.compare_torch.gpu_paxkv")
        kernels = "xla" if engine == PAXKV_XLA else "auto"
        subject = module.paxkv_model(model, kernels, is_rehearsal)
    return getattr(subject, method)(*arguments, seed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {BENCHMARK} --platform gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", choices=sorted(MODEL_CONFIGS), metavar="MODEL", help="one model")
    add_run_arguments(parser, time_limit_s=530.0)
    arguments = parser.parse_args(argv)
    groups = [
        (units_of(model, engine, is_rehearsal=arguments.rehearse), limit_s)
        for model, engine, limit_s in GROUPS
        if arguments.only in (None, model)
    ]
    machine = machine_units(is_rehearsal=arguments.rehearse)
    if arguments.list:
        units = [*machine, *(unit for group, _ in groups for unit in group)]
        print("\n".join(unit.key for unit in units))
        return 0
    run = UnitRun(
        arguments, benchmark=BENCHMARK, listed_by=LISTED_BY, default_out="compare_torch_gpu.jsonl"
    )
    stages = [Stage(groups=[machine])]
    stages += [Stage(groups=[group], limit_s=limit_s) for group, limit_s in groups]
    code = run.run(stages)
    if code is not None:
        return code
    text = report(run.rows, device=run.device)
    if problems := problem_lines(run.results):
        text += "\n\n## Problems\n\n" + "\n".join(problems)
    return run.finish(text)


def report(rows: Sequence[Mapping[str, Any]], *, device: str) -> str:
    """Markdown: a table per model with a column per engine, and paxkv's ratio to transformers.

    Args:
        rows: Of all units, those of resumed runs included.
    """
    rates = device_rates(rows)
    copy_gb_per_s = rates.get("copy_gb_per_s")
    copy = f"{copy_gb_per_s:,.0f} GB/s" if copy_gb_per_s else "not measured"
    parts = [
        f"# Whole models on {device}",
        f"Random weights. Copy bandwidth, bytes read and written: {copy}.",
    ]
    cells: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for row in rows:
        kind, model, case, engine = row["unit"].split("|")
        if kind == "time" and "median" in row:
            of_case = cells.setdefault(model, {})
            of_case.setdefault((case, row["metric"]), {})[engine] = row["median"]
            share = roofline_percent(row, copy_gb_per_s)
            if share is not None:
                of_case.setdefault((case, "roofline_percent"), {})[engine] = share
    engines = (PAXKV, PAXKV_XLA, TRANSFORMERS)
    for model, of_model in cells.items():
        lines = []
        for (case, metric), by_engine in of_model.items():
            values = [f"{by_engine[name]:,.2f}" if name in by_engine else "" for name in engines]
            lines.append([f"{case}: {metric}", *values, _ratio(by_engine)])
        head = ["case", *engines, "paxkv / transformers"]
        parts += [f"## {model}", markdown_table(head, lines)]
    return "\n\n".join(parts)


def roofline_percent(row: Mapping[str, Any], copy_gb_per_s: float | None) -> float | None:
    """Share of the copy bandwidth at which a decode step reads; None for other rows."""
    if row["metric"] != "step_ms" or "read_bytes_per_step" not in row or not copy_gb_per_s:
        return None
    return 100 * row["read_bytes_per_step"] / (1e6 * row["median"]) / copy_gb_per_s


def _ratio(by_engine: Mapping[str, float]) -> str:
    if not {PAXKV, TRANSFORMERS} <= by_engine.keys():
        return ""
    return f"{by_engine[PAXKV] / by_engine[TRANSFORMERS]:.2f}"
