"""Seconds and host memory to load a checkpoint, compared with transformers.

    python -m benchmarks.startup.loading
    python -m benchmarks.startup.loading --dtype bfloat16 --num-repetitions 1

Writes a random checkpoint of several files in the shape of a published model. Then each repetition
starts one process per loader, which imports it, and measures the loading alone:

    paxkv          `load_model`, in the form in which an engine without flags keeps the weights
    transformers   `AutoModelForCausalLM.from_pretrained`

Figures:

    load s         until all weights are in memory
    CPU s          user and system time of the process during the load
    peak           the highest resident memory of the process, minus the resident memory before
                   the load. Pages of mapped files are included
    beyond model   peak minus the size of the model's arrays. On a CPU these arrays are host memory

The files are bfloat16. With `--dtype bfloat16`, transformers returns views of the mapped files, and
has read no weight when the time ends. With float32, both loaders make arrays of their own.

The files are in the system's memory, because they were just written. Memory is read from Linux's
/proc; a write to /proc/self/clear_refs resets the peak.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.command_line import BenchmarkError, output_file, positive_int, run_benchmark
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.startup.shapes import SHAPES, write_shape
from benchmarks.tables import markdown_table, spread

DTYPES = ("bfloat16", "float32")
FIGURES = {
    "load_s": "load, s",
    "cpu_s": "CPU s",
    "peak_mb": "peak, MB",
    "model_mb": "model, MB",
    "beyond_model_mb": "beyond model, MB",
}
_ROOT = Path(__file__).resolve().parents[2]
_MB = 10**6


def load_with_paxkv(folder: str, dtype: str) -> Callable[[], int]:
    """Imports paxkv. The result loads the model, and returns the bytes of its arrays."""
    import jax  # noqa: PLC0415

    from models.loading.load_model import load_model  # noqa: PLC0415
    from models.platforms import default_platform  # noqa: PLC0415

    platform = default_platform()
    jax.block_until_ready(jax.numpy.zeros(1))  # starts JAX's backend

    def load() -> int:
        panel_width = platform.column_panel_width(batch_invariant=False)
        model = load_model(folder, dtype=dtype, platform=platform, panel_width=panel_width)
        jax.block_until_ready(model.params)
        return sum(param.nbytes for param in model.params)

    return load


def load_with_transformers(folder: str, dtype: str) -> Callable[[], int]:
    """As `load_with_paxkv`."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    def load() -> int:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        return sum(param.nbytes for param in model.parameters())

    return load


LOADERS: Mapping[str, Callable[[str, str], Callable[[], int]]] = {
    "paxkv": load_with_paxkv,
    "transformers": load_with_transformers,
}


def measure_here(loader: str, folder: str, dtype: str) -> dict[str, float]:
    """`FIGURES` of loading in this process, which must not have loaded anything before."""
    load = LOADERS[loader](folder, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS:")
    start, cpu_start = time.perf_counter(), time.process_time()
    model_bytes = load()
    figures = {
        "load_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu_start,
        "peak_mb": (_status_bytes("VmHWM:") - before) / _MB,
        "model_mb": model_bytes / _MB,
    }
    return figures | {"beyond_model_mb": figures["peak_mb"] - figures["model_mb"]}


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def measure(loader: str, folder: Path, dtype: str) -> dict[str, float]:
    """`FIGURES` of loading in a new process."""
    call = f"measure_here({loader!r}, {str(folder)!r}, {dtype!r})"
    code = f"import json; from {__spec__.name} import measure_here; print(json.dumps({call}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(f"{loader} cannot load the checkpoint: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def result_rows(
    figures: Mapping[str, Mapping[str, Sequence[float]]],
    case: str,
    *,
    device: str,
    shard_sizes: Sequence[int],
) -> list[ResultRow]:
    return [
        ResultRow(
            benchmark="benchmarks.startup.loading",
            case=f"loader={loader} {case}",
            metric=name,
            values=values,
            device=device,
            details={"shard_mb": [round(size / _MB) for size in shard_sizes]},
        )
        for loader, by_name in figures.items()
        for name, values in by_name.items()
    ]


def table(figures: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Medians with their range as Markdown."""
    lines = [
        [label, *(spread(by_name[name]) for by_name in figures.values())]
        for name, label in FIGURES.items()
    ]
    return markdown_table(["figure", *figures], lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup.loading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of loaded weights")
    parser.add_argument("--loaders", nargs="+", choices=sorted(LOADERS), default=[*LOADERS])
    parser.add_argument(
        "--max-shard-mb", type=positive_int, default=600, metavar="N", help="of one file"
    )
    parser.add_argument("--num-repetitions", type=positive_int, default=3, metavar="N")
    parser.add_argument("--device", default=processor_name(), help="the chip, for the rows")
    parser.add_argument("--out", type=output_file, default=str(RESULTS_FOLDER / "startup.jsonl"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    if not Path("/proc/self/clear_refs").exists():
        raise BenchmarkError("this system has no /proc/self/clear_refs. Use Linux.")
    figures: dict[str, dict[str, list[float]]] = {loader: {} for loader in arguments.loaders}
    with tempfile.TemporaryDirectory(prefix="paxkv-loading-") as name:
        folder = write_shape(
            Path(name), arguments.shape, max_shard_bytes=arguments.max_shard_mb * _MB
        )
        shard_sizes = sorted(path.stat().st_size for path in folder.glob("*.safetensors"))
        for _ in range(arguments.num_repetitions):
            for loader in arguments.loaders:
                for figure, value in measure(loader, folder, arguments.dtype).items():
                    figures[loader].setdefault(figure, []).append(value)
    case = f"shape={arguments.shape} num_shards={len(shard_sizes)} dtype={arguments.dtype}"
    rows = result_rows(figures, case, device=arguments.device, shard_sizes=shard_sizes)
    append_rows(rows, arguments.out)
    print(table(figures))
    print(f"\nfiles: {sum(shard_sizes) / _MB:.0f} MB, the largest {shard_sizes[-1] / _MB:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
