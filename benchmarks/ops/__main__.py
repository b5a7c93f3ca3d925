"""Checks and times the ops of `pallas_kernels`.

On a GPU (JAX with CUDA; torch's attention is timed too if torch is there):

    python -m benchmarks.ops --platform gpu

measures what the device can do (a copy, a matrix product), checks every op on fresh random inputs
against float64, times it beside its peers (JAX's cuDNN and dense attention, torch's SDPA and
FlexAttention), and prints a table. It ends within --time-limit, whatever fails on the way: each
group of units has a process of its own, and what dies is a line of the report. Each result is at
once a line of the file --out; the report goes beside it, with the suffix .md.

    --list            what there is to do, one unit a line
    --only OP         one op, such as paged_attention
    --body BODY       one body, such as mosaic_gpu, xla, jax, torch
    --quick           a sixth of the checks and the first timings, about two minutes
    --compile-only    compiles every GPU unit for an H200 on a machine without one
    --tune            after the rest, tries other block configurations

A failure is repeated with the run's --seed, which it prints first, and --only.

On a CPU,

    python -m benchmarks.ops --platform cpu

times XLA's bodies beside the machine's bandwidth and torch's SDPA; it knows --quick and --out.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.command_line import (
    output_file,
    output_folder,
    positive_float,
    run_benchmark,
    seed_number,
)
from benchmarks.ops.cpu import run_cpu
from benchmarks.ops.gpu import GpuOptions, run_compile_only, run_gpu
from benchmarks.ops.gpu_list import all_units
from benchmarks.result_rows import RESULTS_FOLDER

DEFAULT_TARGET_CONFIG = Path("tests/aot/h200_target_config.textproto")

# Flags that the CPU's half does not know.
_OF_GPU = (
    *("only", "body", "list", "time_limit", "seed", "commit", "logs"),
    *("rehearse", "compile_only", "target_config", "tune"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--platform", choices=("gpu", "cpu"), required=True)
    parser.add_argument(
        "--out", type=output_file, help="file of JSON lines that rows are appended to"
    )
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", metavar="OP", help="one op")
    parser.add_argument("--body", metavar="BODY", help="one body, such as xla or torch")
    parser.add_argument("--list", action="store_true", help="print the units and end")
    parser.add_argument(
        "--time-limit", type=positive_float, default=450.0, metavar="S", help="in seconds"
    )
    parser.add_argument("--seed", type=seed_number, help="of the inputs; drawn if not given")
    parser.add_argument("--commit", help="for the rows, where the code is no git checkout")
    parser.add_argument(
        "--logs", type=output_folder, help="folder for the processes' events and logs"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same program in small on a CPU, with the bodies that run there: to test it",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile ahead of time for an H200; needs the jax-cuda13 plugin wheels and ptxas",
    )
    parser.add_argument(
        "--target-config",
        type=Path,
        default=DEFAULT_TARGET_CONFIG,
        help="description of the GPU to compile for",
    )
    parser.add_argument("--tune", action="store_true", help="try other block configurations, last")
    arguments = parser.parse_args(argv)
    if arguments.platform == "cpu":
        for name in _OF_GPU:
            if getattr(arguments, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} is of --platform gpu")
        return run_cpu(quick=arguments.quick, out=arguments.out)
    # What a rehearsal measures are no results.
    folder = Path(tempfile.mkdtemp()) if arguments.rehearse else RESULTS_FOLDER
    out = arguments.out or folder / "ops_gpu.jsonl"
    if arguments.list:
        units = all_units(
            is_rehearsal=arguments.rehearse,
            is_quick=arguments.quick,
            only=arguments.only,
            body=arguments.body,
            is_tuning=arguments.tune,
        )
        print("\n".join(unit.key for unit in units))
        return 0
    options = GpuOptions(
        out=out,
        only=arguments.only,
        body=arguments.body,
        time_limit_s=arguments.time_limit,
        is_quick=arguments.quick,
        is_rehearsal=arguments.rehearse,
        is_tuning=arguments.tune,
        seed=arguments.seed,
        commit=arguments.commit,
        folder=arguments.logs,
    )
    if arguments.compile_only:
        return run_compile_only(options, arguments.target_config)
    return run_gpu(options)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
