"""Checks every op of `pallas_kernels` against float64, and measures its speed.

On a GPU (JAX with CUDA):

    python -m benchmarks.ops --platform gpu

measures the device (a copy, a matrix product), checks every op on random inputs against float64,
times each body at full size, and prints a table. Units run in worker processes, so a crash or a
hang of a kernel costs only one unit. Each result is appended to --out immediately. The report is
written next to it, as gpu.ops.md next to gpu.jsonl. The run ends within --time-limit, and the same
command continues it.

On a CPU:

    python -m benchmarks.ops --platform cpu

checks and times XLA's bodies on one core, and measures memory bandwidth and torch's attention.
"""

import argparse
import sys

from benchmarks.command_line import run_benchmark
from benchmarks.ops.cpu import run_cpu
from benchmarks.ops.gpu import run_gpu
from benchmarks.units.run import add_run_arguments


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--platform", choices=("gpu", "cpu"), required=True)
    parser.add_argument("--quick", action="store_true", help="CPU: fewer and smaller measurements")
    add_run_arguments(parser.add_argument_group("GPU"))
    arguments = parser.parse_args(argv)
    if arguments.platform == "gpu":
        if arguments.quick:
            parser.error("--quick is a flag of --platform cpu; choose one op with --only")
        return run_gpu(arguments)
    shared = ("platform", "quick", "out")
    for name, value in vars(arguments).items():
        if name not in shared and value != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} needs --platform gpu; omit it, or use --platform gpu")
    return run_cpu(quick=arguments.quick, out=arguments.out)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
