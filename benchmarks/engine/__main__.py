"""Offline throughput of paxkv on a seeded workload, with random weights.

    python -m benchmarks.engine --workload mixed --model small --threads 1 --repetitions 3
    python -m benchmarks.engine --workload prefix --prefix-caching both
    python -m benchmarks.engine --workload prefix-no-hits --prefix-caching both

The engine is a process of its own, pinned to --threads processors; it is loaded, compiled and
warmed up before the clock starts. Every repetition adds all requests at once and ends with the last
token; cached prefixes are forgotten between repetitions. Printed, and with --out written as rows:

    tokens_per_s           output tokens by the wall clock
    tokens_per_cpu_s       output tokens by the CPU time of all threads: what the machine's other
                           work disturbs least
    ttft_p50_ms, _p99_ms   from the start of the run to a request's first token
    kv_waste_percent       held token positions of the KV cache that hold no token
    preemptions            requests that lost their blocks and were computed again
    padding_waste_ratio    padding tokens over all tokens computed
    prefix_hit_percent     prompt tokens found in the prefix cache
    compiles_after_ready   programs compiled after the engine was ready

With --prefix-caching both, two engines run in turn, and their ratio is given too.
"""

import contextlib
import sys
from pathlib import Path

from benchmarks.engine.measure import (
    Contender,
    ratios,
    restless,
    run_in_turn,
    short_cases,
    speed_rows,
    spread,
)
from benchmarks.engine.offline_engine import EngineRun
from benchmarks.engine.options import (
    PAXKV_MODULE,
    case_of,
    chosen_workload,
    engine_spec,
    make_parser,
    paxkv_settings,
    rounded_dtype,
    work_folder,
)
from benchmarks.engine.process import EngineProcess
from benchmarks.markdown_table import markdown_table
from benchmarks.result_rows import ResultRow, append_rows, processor_name

BENCHMARK = "benchmarks.engine"
# Metric -> digits behind the point; what an engine counts besides has none.
DIGITS = {
    "tokens_per_s": 1,
    "tokens_per_cpu_s": 1,
    "ttft_p50_ms": 1,
    "ttft_p99_ms": 1,
    "kv_waste_percent": 2,
    "padding_waste_ratio": 4,
    "prefix_hit_percent": 1,
    "cache_on_times_off_per_cpu_s": 3,
    "cache_on_times_off_per_s": 3,
}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(f"python -m {BENCHMARK}", __doc__)
    parser.add_argument("--prefix-caching", choices=("on", "off", "both"), default="on")
    arguments = parser.parse_args(argv)
    modes = ("on", "off") if arguments.prefix_caching == "both" else (arguments.prefix_caching,)
    settings = {
        mode: paxkv_settings(arguments) | {"enable_prefix_caching": mode == "on"} for mode in modes
    }
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
    problem = None if rounded_dtype(arguments) else _token_problem(runs)
    if problem is not None:
        print(problem)
        return 1
    rows = []
    for mode in modes:
        case = case_of(arguments, "paxkv", settings[mode])
        rows += speed_rows(BENCHMARK, case, runs[mode], processor_name())
    if len(modes) == 2:
        case = case_of(arguments, "paxkv", paxkv_settings(arguments))
        for figure in ("tokens_per_cpu_s", "tokens_per_s"):
            rows.append(
                ResultRow(
                    benchmark=BENCHMARK,
                    case=case,
                    metric=figure.replace("tokens", "cache_on_times_off"),
                    values=ratios(runs["on"], runs["off"], figure),
                    device=processor_name(),
                )
            )
    print(_table(rows))
    for line in restless(runs):
        print(line)
    if arguments.out is not None:
        append_rows(rows, Path(arguments.out))
    return 0


def _token_problem(runs: dict[str, list[EngineRun]]) -> str | None:
    """Where the tokens of any run are not those of the first; greedy ones must be."""
    first = next(iter(runs.values()))[0].token_ids
    for mode, of_mode in runs.items():
        for repetition, run in enumerate(of_mode):
            wrong = [idx for idx, ids in enumerate(run.token_ids) if ids != first[idx]]
            if wrong:
                return (
                    f"DIFFERENT: prefix caching {mode}, repetition {repetition}: tokens of "
                    f"{len(wrong)} of {len(first)} requests, the first is {wrong[0]}. No row is "
                    "written."
                )
    return None


def _table(rows: list[ResultRow]) -> str:
    """A line a metric, a column a case; a case is headed by what sets it apart."""
    cases = list(dict.fromkeys(row.case for row in rows))
    title, heads = short_cases(cases)
    found = {(row.metric, row.case): row for row in rows}
    lines = []
    for metric in dict.fromkeys(row.metric for row in rows):
        cells = [
            spread(found[metric, case].values, DIGITS.get(metric, 0))
            if (metric, case) in found
            else ""
            for case in cases
        ]
        lines.append([metric, *cells])
    return f"{title}\n\n{markdown_table(['metric', *(h or 'value' for h in heads)], lines)}"


if __name__ == "__main__":
    sys.exit(main())
