"""Runs one workload and one random checkpoint on paxkv and on torch, and prints the ratio.

    python -m benchmarks.compare_torch --workload mixed --model small --threads 1 --repetitions 3
    python -m benchmarks.compare_torch --engines static-8 static-16 --threads 2

Engines that paxkv is compared with:

    static-N       transformers' `generate` on static batches of N requests in order of arrival,
                   padded on the left; a batch runs until its longest output is complete
    continuous     transformers' continuous batching with the settings of `generate_batch`: all
                   requests at once, up to 8,192 tokens per step, which suits GPUs
    continuous-N   the same with settings for a CPU: at most N requests at once, 512 tokens per step
    contiguous-N   a plain torch loop on static batches of N with a preallocated contiguous cache

Each engine has its own process, pinned to the same --threads processors. It is loaded and warmed up
once. The engines run in turn, A B C A B C. A line UNFAIR names each engine that used the processor
while others ran. Only tokens that a request asked for count. "Ratio" is paxkv's figure divided by
the other engine's figure of the same repetition.

In float32, all engines must make the same greedy tokens. Otherwise the command exits with 1 and
names the first difference and the gap between the logits of the two tokens.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from benchmarks.command_line import natural_float, run_benchmark
from benchmarks.compare_torch.compare_tokens import LogitGap, differences
from benchmarks.engine.measure import (
    Contender,
    ratios,
    run_in_turn,
    speed_rows,
    unfair_engines,
)
from benchmarks.engine.offline_engine import EngineRun, Setting
from benchmarks.engine.options import (
    PAXKV_MODULE,
    case_of,
    chosen_workload,
    engine_spec,
    make_parser,
    parse_options,
    paxkv_settings,
    rounded_dtype,
    work_folder,
)
from benchmarks.engine.process import EngineProcess, EngineProcessError
from benchmarks.result_rows import ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table, spread
from benchmarks.workloads import Workload

BENCHMARK = "benchmarks.compare_torch"
# Kind of peer -> its module, and the setting to which the number after its name belongs.
PEERS = {
    "static": ("benchmarks.compare_torch.static_batches", "batch_size"),
    "continuous": ("benchmarks.compare_torch.continuous_batching", "max_requests"),
    "contiguous": ("benchmarks.compare_torch.contiguous_cache", "batch_size"),
}
DEFAULT_ENGINES = ("static-8", "static-16", "continuous", "continuous-8", "contiguous-16")
# Peers that can compute logit gaps.
JUDGES = ("static", "continuous")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(f"python -m {BENCHMARK}", __doc__)
    parser.add_argument(
        "--engines",
        nargs="+",
        type=_engine,
        metavar="KIND[-N]",
        default=[_engine(name) for name in DEFAULT_ENGINES],
        help=f"engines to compare with; default: {' '.join(DEFAULT_ENGINES)}",
    )
    parser.add_argument(
        "--tie-gap",
        type=natural_float,
        default=0.0,
        metavar="LOGITS",
        help="largest logit gap at which two tokens are equally right (default: 0). Logits spread "
        "by about 1, and float32 rounds them by about 1e-6",
    )
    arguments = parse_options(parser, argv)
    # Runs are stored by these names.
    if len(set(arguments.engines)) < len(arguments.engines):
        parser.error("--engines has a value twice; give each value once")
    workload = chosen_workload(arguments)
    with work_folder(arguments, workload) as folder, contextlib.ExitStack() as stack:
        try:
            processes = _start(arguments, folder, stack)
            contenders = _contenders(arguments, processes)
            runs = run_in_turn(contenders, arguments.repetitions)
        except EngineProcessError as error:
            print(f"FAILED: {error}")
            return 1
        judge = next((processes[kind].logit_gap for kind in JUDGES if kind in processes), None)
        problems = _token_problems(arguments, workload, runs, judge)
    if arguments.out is not None and not problems:
        append_rows(_rows(arguments, runs), arguments.out)
    print(_table(runs))
    for line in (*unfair_engines(runs), *problems):
        print(line)
    if problems:
        print("No row is written, because the speed of wrong answers is meaningless.")
    return 1 if problems else 0


def _engine(name: str) -> tuple[str, int | None]:
    """ "static-8" -> ("static", 8), "continuous" -> ("continuous", None)."""
    kind, sign, number = name.partition("-")
    is_number = number.isdecimal() and int(number) > 0
    if kind not in PEERS or not (is_number or name == "continuous"):
        raise argparse.ArgumentTypeError(
            f"must be continuous, or {', '.join(PEERS)} with a number, as in static-8; got {name!r}"
        )
    return kind, int(number) if sign else None


def _start(
    arguments: argparse.Namespace, folder: Path, stack: contextlib.ExitStack
) -> dict[str, EngineProcess]:
    """Starts one process for paxkv and one for each kind of peer. Numbers are settings of runs."""
    kinds = dict.fromkeys(kind for kind, _ in arguments.engines)
    modules = {"paxkv": PAXKV_MODULE} | {kind: PEERS[kind][0] for kind in kinds}
    processes = {}
    for kind, module in modules.items():
        settings = paxkv_settings(arguments) if kind == "paxkv" else {}
        process = EngineProcess(
            engine_spec(arguments, folder, module, settings),
            folder / "workload.json",
            folder / f"{kind}.log",
        )
        processes[kind] = stack.enter_context(process)
    return processes


def _contenders(
    arguments: argparse.Namespace, processes: dict[str, EngineProcess]
) -> list[Contender]:
    """Warms up all engines; returns them in the order of their runs."""
    contenders = [Contender(label="paxkv", process=processes["paxkv"], settings={})]
    for kind, number in arguments.engines:
        settings: dict[str, Setting] = {PEERS[kind][1]: number}
        label = kind if number is None else f"{kind}-{number}"
        contenders.append(Contender(label=label, process=processes[kind], settings=settings))
    for contender in contenders:
        contender.process.run(contender.settings, is_warm_up=True)
    return contenders


def _token_problems(
    arguments: argparse.Namespace,
    workload: Workload,
    runs: dict[str, list[EngineRun]],
    judge: LogitGap | None,
) -> list[str]:
    """One line per engine whose tokens differ from the tokens of paxkv's first run."""
    if rounded := rounded_dtype(arguments, paxkv_settings(arguments)):
        print(f"tokens are not compared: rounding to {rounded} may choose other tokens.")
        return []
    wanted = runs["paxkv"][0].token_ids
    problems = []
    for label, of_label in runs.items():
        for repetition, run in enumerate(of_label):
            found = differences(workload, wanted, run.token_ids, judge)
            wrong = [difference for difference in found if not difference.is_tie(arguments.tie_gap)]
            if wrong:
                problems.append(
                    f"DIFFERENT: {label}, repetition {repetition}: {len(wrong)} of "
                    f"{len(workload.requests)} requests; {wrong[0]}."
                )
                # The engine's other repetitions would show the same.
                break
            if found:
                print(f"{label}: {len(found)} ties within {arguments.tie_gap:g}; {found[0]}.")
    return problems


def _rows(arguments: argparse.Namespace, runs: dict[str, list[EngineRun]]) -> list[ResultRow]:
    rows = []
    for label, of_label in runs.items():
        case = case_of(arguments, label, paxkv_settings(arguments))
        rows += speed_rows(BENCHMARK, case, of_label, processor_name())
        if label == "paxkv":
            continue
        for figure in ("tokens_per_cpu_s", "tokens_per_s"):
            rows.append(
                ResultRow(
                    benchmark=BENCHMARK,
                    case=case,
                    metric=figure.replace("tokens", "paxkv_times"),
                    values=ratios(runs["paxkv"], of_label, figure),
                    device=processor_name(),
                )
            )
    return rows


def _table(runs: dict[str, list[EngineRun]]) -> str:
    head = ["engine", "tokens / CPU-s", "tokens / s", "ratio by CPU-s", "ratio by s"]
    lines = []
    for label, of_label in runs.items():
        cells = [
            spread([getattr(run, figure) for run in of_label])
            for figure in ("tokens_per_cpu_s", "tokens_per_s")
        ]
        for figure in ("tokens_per_cpu_s", "tokens_per_s"):
            cells.append(spread(ratios(runs["paxkv"], of_label, figure)))
        lines.append([label, *cells])
    return markdown_table(head, lines)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
