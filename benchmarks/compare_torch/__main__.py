"""Compares paxkv with torch and transformers, with `--platform cpu` (default) or `gpu`."""

import argparse
import sys

from benchmarks.command_line import run_benchmark
from benchmarks.compare_torch import cpu, gpu


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    chosen, others = parser.parse_known_args(argv)
    return gpu.main(others) if chosen.platform == "gpu" else cpu.main(others)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
