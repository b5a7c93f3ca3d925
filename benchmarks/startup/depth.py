"""CPU seconds of compiling all programs of a model with few and with many layers.

    python -m benchmarks.startup.depth
    python -m benchmarks.startup.depth --kinds small-gdn mamba2 --layers 8 32

Each measurement runs `python -m paxkv.compile` in a new process, for a random model. The CPU
seconds are the user and system time of this process. As in a first start, they include the imports
and the drawing of random weights. The kinds whose names begin with "small" have the layers of these
models in `benchmarks.random_checkpoint`, but narrow MLPs and a small vocabulary, so that drawing
takes little time. `python -m benchmarks.report` plots the rows.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import output_file, positive_int, run_benchmark
from benchmarks.random_checkpoint import MAX_POSITION_EMBEDDINGS, MODEL_SHAPES
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table, number, spread

ROOT = Path(__file__).resolve().parents[2]
_SHAPES = ("small", "small-moe", "small-latent", "small-gdn", "small-mamba2")
_NARROW = {"intermediate_size": 128, "vocab_size": 1024}
# Its layers have states, and neither attention nor MLPs.
_MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": _NARROW["vocab_size"],
    "hidden_size": 512,
    "num_heads": 16,
    "head_dim": 64,
    "state_size": 64,
    "n_groups": 1,
    "tie_word_embeddings": True,
}
KINDS = (*_SHAPES, "mamba2")
COMPILE_COMMAND = (sys.executable, "-m", "paxkv.compile")
# With them, there are few sizes of programs, but every kind of program.
_FLAGS = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")


def config_of(kind: str, num_layers: int) -> dict[str, object]:
    """The config.json of a model of one of `KINDS` with this many layers."""
    if kind == "mamba2":
        return _MAMBA2 | {"num_hidden_layers": num_layers}
    shape = dataclasses.replace(MODEL_SHAPES[kind], num_layers=num_layers, **_NARROW)
    return shape.config_fields() | {
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
    }


def measure(kind: str, num_layers: int, flags: Sequence[str]) -> float:
    """CPU seconds of a process that compiles all programs.

    Raises:
        subprocess.CalledProcessError: The process failed. Its errors are on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="paxkv-depth-") as folder:
        config = config_of(kind, num_layers)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [*COMPILE_COMMAND, "--model", folder, "--out", f"{folder}/programs"]
        command += ["--load-format", "dummy", *_FLAGS, *flags]
        before_s = _cpu_s_of_children()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return _cpu_s_of_children() - before_s


def _cpu_s_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    few, many = arguments.layers
    lines, flags = [], arguments.compile_arguments
    for kind in arguments.kinds:
        of_depths: dict[int, list[float]] = {few: [], many: []}
        for _ in range(arguments.num_repetitions):
            for num_layers, values in of_depths.items():
                values.append(measure(kind, num_layers, flags))
        rows = [
            ResultRow(
                benchmark="benchmarks.startup.depth",
                case=f"kind={kind} num_layers={num_layers} flags={' '.join(flags) or 'none'}",
                metric="cpu_s",
                values=values,
                device=arguments.device,
            )
            for num_layers, values in of_depths.items()
        ]
        append_rows(rows, arguments.out)
        of_few, of_many = (row.median for row in rows)
        lines.append([kind, *map(spread, of_depths.values()), number(of_many / of_few)])
    print(markdown_table(["CPU s", f"{few} layers", f"{many} layers", "ratio"], lines))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup.depth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--layers", nargs=2, type=positive_int, default=(8, 32), metavar="N")
    parser.add_argument("--num-repetitions", type=positive_int, default=1, metavar="N")
    parser.add_argument("--device", default=processor_name(), help="the chip, for the rows")
    parser.add_argument("--out", type=output_file, default=str(RESULTS_FOLDER / "startup.jsonl"))
    parser.add_argument(
        "compile_arguments", nargs="*", metavar="-- FLAG", help="flags of python -m paxkv.compile"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_benchmark(main, subprocess.CalledProcessError))
