"""Whole models on one GPU: paxkv beside transformers, on the same card, in one run.

    python -m benchmarks.gpu

measures Qwen3-0.6B and Llama-3.1-8B in bfloat16, with random weights in their published shapes,
which each engine draws on the device (so tokens differ between engines, and nothing is fetched):

    decode         steps of 64, 256 and 1 requests with 512 tokens and more behind them: time,
                   tokens/s, share of the memory roofline (weights, keys and values that a step
                   must read, over the copy bandwidth measured in the same run), time between two
                   tokens, what the host does a step, how long the device waits for it
    first token    of one prompt of 512 and of 2,048 tokens
    throughput     256 requests of 32 to 512 tokens that want 16 to 256 more, all at once: by
                   paxkv's engine; by its compiled steps under a schedule of this benchmark's own;
                   by transformers' continuous batching, as it sets itself up, and its `generate`
                   on one static batch
    prefix         64 prompts with the same 512 tokens at their beginning, prefix cache on and off
    kernels        decode and first token again with --kernels xla

It ends within --time-limit, whatever fails on the way: each engine and model has a process of its
own and a limit, and what dies or comes too late is a line of the report. The most wanted comes
first; a run for each model (--only) has time for more. Each figure is at once a line of the file
--out; the report goes beside it, with the suffix .md.

Needs jax (with CUDA), flax, numpy, safetensors, huggingface_hub and tqdm, and says so at once where
one is missing. Without torch and transformers there are no peers; without msgspec, cbor2, xxhash
and pyzmq paxkv's engine is left out (throughput is then that of its steps alone).

Every bound in the report is labelled wanted; what is not measured is not in it.
"""

import argparse
import importlib
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
from benchmarks.gpu.packages import STEP_PACKAGES, missing_packages, missing_text

RESULTS_FILE = Path(__file__).resolve().parents[1] / "results" / "gpu.jsonl"
MODELS = ("qwen3-0.6b", "llama-3.1-8b")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=output_file, help="file of JSON lines that rows are appended to"
    )
    parser.add_argument("--only", choices=MODELS, metavar="MODEL", help=" or ".join(MODELS))
    parser.add_argument(
        "--time-limit", type=positive_float, default=530.0, metavar="S", help="in seconds"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="of prompts and lengths")
    parser.add_argument("--commit", help="for the rows, where the code is no git checkout")
    parser.add_argument(
        "--logs", type=output_folder, help="folder for the processes' events and logs"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same program on a CPU, with tiny models: to test it",
    )
    arguments = parser.parse_args(argv)
    missing = missing_packages(STEP_PACKAGES)
    if missing:
        print(missing_text("this benchmark", missing))
        return 2
    # Late: without those packages it could not even be imported.
    run = importlib.import_module("benchmarks.gpu.run")
    # What a rehearsal measures are no results.
    rehearsal_file = Path(tempfile.mkdtemp()) / "gpu.jsonl" if arguments.rehearse else None
    options = run.GpuOptions(
        out=arguments.out or rehearsal_file or RESULTS_FILE,
        only=arguments.only,
        time_limit_s=arguments.time_limit,
        is_rehearsal=arguments.rehearse,
        seed=arguments.seed,
        commit=arguments.commit,
        folder=arguments.logs,
    )
    return run.run_gpu(options)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
