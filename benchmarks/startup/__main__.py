"""Seconds from the start of the server's process to its first token, cold and warm.

    python -m benchmarks.startup
    python -m benchmarks.startup --num-repetitions 5 -- --model FOLDER --max-num-seqs 16
    python -m benchmarks.startup --shape qwen3-0.6b --num-repetitions 1

Each repetition starts `python -m paxkv.serve` twice on a free port: first with an empty folder of
compiled programs (cold), then with the programs that the first start stored there (warm). It asks
for one token when the server is ready, then stops the server. Flags after `--` are the server's;
with `--compiled-dir FOLDER`, both starts load programs that `python -m paxkv.compile` wrote. With
--shape, the model is a random checkpoint in the shape of a published model. It is written before
the first start and deleted after the last.

Milestones, in seconds since the start of the process:

    model        weights are loaded and the KV cache is allocated
    programs     every program is compiled or loaded
    ready        the port is open
    first token  the first piece of an answer has arrived over HTTP

After the first token, on Linux, the costs of the server and its engine processes are read:

    CPU s          user and system time
    peak RSS       the sum of the processes' peaks of resident memory
    RSS            resident memory now; weights that were read from a mapped file may be included
    anonymous      the part of RSS that is not a file

A process imports everything before the first measurement, so that the files are in memory in every
measured start. The cache folder is a new XDG_CACHE_HOME, and JAX_COMPILATION_CACHE_DIR is removed
from the server's environment. `python -m benchmarks.report` plots the rows.
"""

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import httpx

from benchmarks.command_line import output_file, positive_float, positive_int, run_benchmark
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.startup.process_cost import process_cost
from benchmarks.startup.shapes import SHAPES, write_shape
from benchmarks.tables import markdown_table, spread

ROOT = Path(__file__).resolve().parents[2]
MILESTONES = ("model", "programs", "ready", "first token")
STARTS = ("cold", "warm")
# Figure -> its name in the table.
COSTS = {
    "cpu_s": "CPU s",
    "peak_rss_mib": "peak RSS, MiB",
    "rss_mib": "RSS, MiB",
    "anonymous_mib": "anonymous, MiB",
}
SERVE_COMMAND = (sys.executable, "-m", "paxkv.serve")
_IMPORT = "import paxkv.serve, paxkv.entrypoints.engine_process"
# What the server prints at each milestone; the first two groups of "programs" are counts.
_LINES = {
    "model": re.compile(r"KV cache: \d+ blocks"),
    "programs": re.compile(r"programs: (\d+) loaded.*, (\d+) compiled"),
    "ready": re.compile(r" is ready at (\S+)/v1"),
}
_STOP_TIMEOUT_S = 60.0
_NUM_SHOWN_LINES = 20


class StartError(Exception):
    """The server produced no token; the message includes the last lines of its output."""


def measure_start(
    serve_arguments: Sequence[str], cache_home: Path, timeout_s: float
) -> dict[str, float]:
    """Seconds to each of `MILESTONES`, "num_loaded" and "num_compiled" programs, and `COSTS`.

    Raises:
        StartError: The server ended early, took too long, or gave no token.
    """
    command = [*SERVE_COMMAND, "--port", "0", *serve_arguments]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=server_environment(os.environ, cache_home),
        stdout=subprocess.PIPE,
        # One pipe for both keeps their lines in order.
        stderr=subprocess.STDOUT,
    )
    # Kills a server that hangs, so that reading its output ends too.
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        figures, url = _read_milestones(process, start)
        figures["first token"] = _first_token_time(url, timeout_s) - start
        return figures | process_cost(process.pid)
    finally:
        watchdog.cancel()
        _stop(process)


def server_environment(environment: Mapping[str, str], cache_home: Path) -> dict[str, str]:
    """An environment in which compiled programs are stored only below `cache_home`."""
    changed = {k: v for k, v in environment.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    old_cache_home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    # Models of the Hub stay in their folder.
    changed.setdefault("HF_HOME", str(Path(old_cache_home) / "huggingface"))
    return changed | {"XDG_CACHE_HOME": str(cache_home)}


def _read_milestones(
    process: subprocess.Popen[bytes], start: float
) -> tuple[dict[str, float], str]:
    """Waits until the server is ready; returns the figures so far and its address."""
    figures: dict[str, float] = {}
    printed: list[str] = []
    for line, now in _timed_lines(process.stdout):
        printed.append(line)
        for name, pattern in _LINES.items():
            if name in figures or (found := pattern.search(line)) is None:
                continue
            figures[name] = now - start
            if name == "programs":
                figures["num_loaded"], figures["num_compiled"] = map(int, found.groups())
            if name == "ready":
                return _with_all_milestones(figures, printed), found.group(1)
    raise StartError(
        f"the server ended with code {process.wait()} before it was ready. {_last_lines(printed)}"
    )


def _timed_lines(pipe: IO[bytes]) -> Iterator[tuple[str, float]]:
    r"""Each line with the time when its end was read; a progress bar's lines end in "\r"."""
    rest = b""
    while data := os.read(pipe.fileno(), 2**16):
        now = time.perf_counter()
        *whole, rest = re.split(rb"[\r\n]", rest + data)
        for line in whole:
            yield line.decode("utf-8", errors="replace"), now


def _with_all_milestones(figures: dict[str, float], printed: Sequence[str]) -> dict[str, float]:
    missing = [name for name in _LINES if name not in figures]
    if missing:
        raise StartError(
            f"the server is ready, but printed no line for {', '.join(missing)}. "
            f"{_last_lines(printed)}"
        )
    return figures


def _last_lines(printed: Sequence[str]) -> str:
    lines = [line for line in printed if line.strip()]
    return "\n    ".join(["Its last lines:", *lines[-_NUM_SHOWN_LINES:]])


def _first_token_time(url: str, timeout_s: float) -> float:
    """Time at which the first piece of an answer arrives.

    Raises:
        StartError: None arrives.
    """
    # Token ids that every model has, so that no tokenizer is needed.
    body = {"prompt": [3, 4, 5, 6, 7, 8, 9, 10], "max_tokens": 1, "stream": True}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout_s) as answer:
            answer.raise_for_status()
            for data in answer.iter_bytes():
                if b"choices" in data:
                    return time.perf_counter()
    except httpx.HTTPError as error:
        raise StartError(f"no first token: {type(error).__name__}: {error}") from error
    raise StartError("no first token: the answer was empty.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        # Reads the output, because a process whose pipe is full never ends.
        process.communicate(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _import_everything() -> None:
    """Loads all files into the operating system's cache."""
    command = [sys.executable, "-c", _IMPORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(f"paxkv cannot be imported. {_last_lines(done.stderr.splitlines())}")


def measure_starts(
    serve_arguments: Sequence[str], num_repetitions: int, timeout_s: float
) -> dict[str, dict[str, list[float]]]:
    """Start -> figure -> one value per repetition.

    Raises:
        StartError: A start failed.
    """
    figures: dict[str, dict[str, list[float]]] = {start: {} for start in STARTS}
    for _ in range(num_repetitions):
        with tempfile.TemporaryDirectory(prefix="paxkv-startup-") as folder:
            for start in STARTS:
                measured = measure_start(serve_arguments, Path(folder), timeout_s)
                for name, value in measured.items():
                    figures[start].setdefault(name, []).append(value)
    return figures


def result_rows(
    figures: Mapping[str, Mapping[str, Sequence[float]]],
    serve_arguments: Sequence[str],
    device: str,
    shape: str | None = None,
) -> list[ResultRow]:
    """One row per start and figure.

    Args:
        serve_arguments: Flags without the folder of `shape`.
    """
    of_shape = "" if shape is None else f" shape={shape}"
    flags = " ".join(serve_arguments) or "none"
    return [
        ResultRow(
            benchmark="benchmarks.startup",
            case=f"start={start}{of_shape} flags={flags}",
            metric=f"{name.replace(' ', '_')}_s" if name in MILESTONES else name,
            values=values,
            device=device,
        )
        for start, by_name in figures.items()
        for name, values in by_name.items()
    ]


def table(figures: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Medians with their range as Markdown."""
    lines = []
    for name in MILESTONES:
        lines.append([name, *(spread(by_name[name]) for by_name in figures.values())])
    for name in ("num_compiled", "num_loaded"):
        cells = [f"{statistics.median(by_name[name]):g}" for by_name in figures.values()]
        lines.append([f"programs {name.removeprefix('num_')}", *cells])
    for name, label in COSTS.items():
        if all(name in by_name for by_name in figures.values()):
            lines.append([label, *(spread(by_name[name]) for by_name in figures.values())])
    made = markdown_table(["s since process start", *figures], lines)
    if max(figures["warm"]["num_compiled"]) > 0:
        made += (
            "\n\nA WARM START COMPILED: it did not find all programs of the cold one. Was a source "
            "file changed between them, or the cache switched off?"
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    flags = arguments.serve_arguments
    try:
        _import_everything()
        with _model_arguments(arguments.shape) as model:
            figures = measure_starts(
                [*model, *flags], arguments.num_repetitions, arguments.timeout_s
            )
    except StartError as error:
        print(f"benchmarks.startup: error: {error}", file=sys.stderr)
        return 1
    rows = result_rows(figures, flags, arguments.device, arguments.shape)
    append_rows(rows, arguments.out)
    print(table(figures))
    return 0


@contextlib.contextmanager
def _model_arguments(shape: str | None) -> Iterator[list[str]]:
    """Flags that name a random model of that shape, which exists until the context ends."""
    if shape is None:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix=f"paxkv-{shape}-") as folder:
        yield ["--model", str(write_shape(Path(folder), shape))]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="serve a random model in this shape"
    )
    parser.add_argument("--num-repetitions", type=positive_int, default=3, metavar="N")
    parser.add_argument(
        "--timeout-s", type=positive_float, default=600.0, metavar="S", help="limit of each start"
    )
    parser.add_argument("--device", default=processor_name(), help="the chip, for the rows")
    parser.add_argument("--out", type=output_file, default=str(RESULTS_FOLDER / "startup.jsonl"))
    parser.add_argument(
        "serve_arguments", nargs="*", metavar="-- FLAG", help="flags of python -m paxkv.serve"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
