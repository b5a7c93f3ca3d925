"""Offline throughput of paxkv on a seeded workload, with random weights.

    python -m benchmarks.engine --workload mixed --model small --threads 1 --repetitions 3
    python -m benchmarks.engine --workload prefix --prefix-caching both
    python -m benchmarks.engine --beside product_dtype=int8 --beside kv_cache_dtype=float16

The engine is a process pinned to --threads processors. It is loaded, compiled and warmed up before
the clock starts. Each repetition adds all requests at once and ends with the last token; the prefix
cache is reset between repetitions. On a CPU, the first repetition is slower, because Linux provides
a page of the KV cache when a step first writes to it. The program prints these figures, and with
--out writes them as rows:

    tokens_per_s           output tokens per second of wall time
    tokens_per_cpu_s       output tokens per second of CPU time of all threads; other work on the
                           machine disturbs this figure least
    ttft_p50_ms, _p99_ms   from the start of the run to a request's first token
    kv_waste_percent       allocated token positions of the KV cache that hold no token
    preemptions            requests that lost their blocks and were computed again
    padding_waste_ratio    padding tokens over all computed tokens
    prefix_hit_percent     prompt tokens found in the prefix cache
    compiles_after_ready   programs compiled after the engine was ready

Two flags compare two engines that run in turn, and print their ratio: --prefix-caching both, and
--beside, which adds settings to the second engine. All runs must make the same tokens, unless
--beside rounds numbers.
"""

import argparse
import contextlib
import sys

from benchmarks.command_line import run_benchmark
from benchmarks.engine.measure import (
    Contender,
    ratios,
    run_in_turn,
    speed_rows,
    unfair_engines,
)
from benchmarks.engine.offline_engine import EngineRun, Setting
from benchmarks.engine.options import (
    MODEL_FLAGS,
    PAXKV_MODULE,
    case_of,
    chosen_workload,
    engine_spec,
    make_parser,
    named_setting,
    parse_options,
    paxkv_settings,
    rounded_dtype,
    work_folder,
)
from benchmarks.engine.process import EngineProcess, EngineProcessError
from benchmarks.engine.settings import checked_settings, engine_config, settings_by_part
from benchmarks.result_rows import ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table, short_cases, spread

BENCHMARK = "benchmarks.engine"


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(f"python -m {BENCHMARK}", __doc__)
    parser.add_argument("--prefix-caching", choices=("on", "off", "both"), default="on")
    parser.add_argument(
        "--beside",
        metavar="NAME=VALUE",
        type=named_setting,
        action="append",
        default=[],
        help="one more setting of a second engine; may be repeated",
    )
    decided_by = {"enable_prefix_caching": "--prefix-caching"}
    arguments = parse_options(parser, argv, decided_by=decided_by)
    if arguments.beside and arguments.prefix_caching == "both":
        parser.error("--beside cannot be used with --prefix-caching both; choose one of them")
    checked_settings(parser, arguments.beside, decided_by=MODEL_FLAGS)
    settings = _settings_of_modes(arguments)
    configs = [engine_config(settings_by_part(of_mode)) for of_mode in settings.values()]
    if arguments.beside and configs[0] == configs[1]:
        parser.error("--beside changes no setting of the first engine, so both would be equal")
    modes = tuple(settings)
    workload = chosen_workload(arguments)
    with work_folder(arguments, workload) as folder, contextlib.ExitStack() as processes:
        contenders = []
        for mode in modes:
            spec = engine_spec(arguments, folder, PAXKV_MODULE, settings[mode])
            process = EngineProcess(spec, folder / "workload.json", folder / f"{mode}.log")
            processes.enter_context(process)
            process.run({}, is_warm_up=True)
            contenders.append(Contender(label=mode, process=process, settings={}))
        runs = run_in_turn(contenders, arguments.repetitions)
    rounded = [rounded_dtype(arguments, settings[mode]) for mode in modes]
    if any(rounded):
        dtype = next(filter(None, rounded))
        print(f"tokens are not compared: rounding to {dtype} may choose other tokens.")
    problem = None if any(rounded) else _token_problem(runs)
    if problem is not None:
        print(problem)
        return 1
    rows = []
    for mode in modes:
        case = case_of(arguments, "paxkv", settings[mode])
        rows += speed_rows(BENCHMARK, case, runs[mode], processor_name())
    if len(modes) == 2:
        rows += _ratio_rows(arguments, settings, runs)
    if arguments.out is not None:
        append_rows(rows, arguments.out)
    print(_table(rows))
    for line in unfair_engines(runs):
        print(line)
    return 0


def _settings_of_modes(arguments: argparse.Namespace) -> dict[str, dict[str, Setting]]:
    """The settings of each engine, by its name."""
    own = paxkv_settings(arguments)
    if arguments.prefix_caching == "both":
        return {mode: own | {"enable_prefix_caching": mode == "on"} for mode in ("on", "off")}
    own["enable_prefix_caching"] = arguments.prefix_caching == "on"
    modes = {arguments.prefix_caching: own}
    return modes | ({"beside": own | dict(arguments.beside)} if arguments.beside else {})


def _ratio_rows(
    arguments: argparse.Namespace,
    settings: dict[str, dict[str, Setting]],
    runs: dict[str, list[EngineRun]],
) -> list[ResultRow]:
    """The speed of one engine divided by the speed of the other."""
    if "beside" in runs:
        metric, case = "times_without", case_of(arguments, "paxkv", settings["beside"])
        ours, others = runs["beside"], runs[arguments.prefix_caching]
    else:
        metric, case = "cache_on_times_off", case_of(arguments, "paxkv", paxkv_settings(arguments))
        ours, others = runs["on"], runs["off"]
    return [
        ResultRow(
            benchmark=BENCHMARK,
            case=case,
            metric=figure.replace("tokens", metric),
            values=ratios(ours, others, figure),
            device=processor_name(),
        )
        for figure in ("tokens_per_cpu_s", "tokens_per_s")
    ]


def _token_problem(runs: dict[str, list[EngineRun]]) -> str | None:
    """Names a run whose greedy tokens differ from the first run's; None if none differs."""
    first = next(iter(runs.values()))[0].token_ids
    for mode, of_mode in runs.items():
        for repetition, run in enumerate(of_mode):
            wrong = [idx for idx, ids in enumerate(run.token_ids) if ids != first[idx]]
            if wrong:
                return (
                    f"DIFFERENT: engine {mode!r}, repetition {repetition}: the tokens of "
                    f"{len(wrong)} of {len(first)} requests differ, first of request {wrong[0]}. "
                    "No row is written."
                )
    return None


def _table(rows: list[ResultRow]) -> str:
    """One line per metric, one column per case; the heads show the fields that differ."""
    cases = list(dict.fromkeys(row.case for row in rows))
    title, heads = short_cases(cases)
    found = {(row.metric, row.case): row for row in rows}
    lines = []
    for metric in dict.fromkeys(row.metric for row in rows):
        cells = [
            spread(found[metric, case].values) if (metric, case) in found else "" for case in cases
        ]
        lines.append([metric, *cells])
    return f"{title}\n\n{markdown_table(['metric', *(h or 'value' for h in heads)], lines)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main, EngineProcessError))
