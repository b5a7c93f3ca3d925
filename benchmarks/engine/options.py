"""Command line options of the offline benchmarks, and the objects made from them."""

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.command_line import (
    BenchmarkError,
    output_file,
    positive_int,
    seed_number,
    whole_number,
)
from benchmarks.engine.offline_engine import EngineSpec, Setting
from benchmarks.engine.settings import checked_settings
from benchmarks.random_checkpoint import MODEL_SHAPES, NUMPY_DTYPES, write_checkpoint
from benchmarks.workloads import WORKLOADS, Workload, make_workload

PAXKV_MODULE = "benchmarks.engine.paxkv_engine"
# paxkv's settings that flags of the benchmark set.
MODEL_FLAGS = {"model": "--model", "dtype": "--dtype"}
_NOT_ROUNDED = ("auto", "none", "float32")
_ROUNDING_SETTINGS = ("product_dtype", "quantization", "kv_cache_dtype")


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options of every offline benchmark."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workload", choices=list(WORKLOADS), default="mixed")
    parser.add_argument(
        "--model", choices=list(MODEL_SHAPES), default="small", help="shape of the random model"
    )
    parser.add_argument(
        "--threads",
        type=whole_number(1, _num_processors()),
        default=1,
        help="processors that an engine's process is pinned to",
    )
    parser.add_argument("--repetitions", type=positive_int, default=3)
    parser.add_argument("--dtype", choices=list(NUMPY_DTYPES), default="float32")
    parser.add_argument(
        "--seed", type=seed_number, default=0, help="seed of the weights and the workload"
    )
    parser.add_argument(
        "--num-requests", type=positive_int, help="run only the first N requests of the workload"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="NAME=VALUE",
        type=named_setting,
        action="append",
        default=[],
        help="a setting of paxkv, such as block_size=32 or max_num_batched_tokens=1024",
    )
    parser.add_argument("--block-size", type=int, help="paxkv's block_size")
    parser.add_argument("--max-num-seqs", type=int, help="paxkv's max_num_seqs")
    parser.add_argument("--out", type=output_file, help="file of JSON lines to append rows to")
    return parser


def parse_options(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    decided_by: Mapping[str, str] = {},
) -> argparse.Namespace:
    """Parses a command line with `make_parser`'s parser; on an error, prints the usage and exits.

    Args:
        decided_by: paxkv's setting -> flag that sets it instead of --set.
    """
    arguments = parser.parse_args(argv)
    own = {"block_size": "--block-size", "max_num_seqs": "--max-num-seqs"}
    doubled = {name: flag for name, flag in own.items() if getattr(arguments, name) is not None}
    decided_by = MODEL_FLAGS | doubled | decided_by
    checked_settings(parser, arguments.settings, decided_by=decided_by)
    checked_settings(parser, list(paxkv_settings(arguments).items()), decided_by={})
    return arguments


def paxkv_settings(arguments: argparse.Namespace) -> dict[str, Setting]:
    """paxkv's settings, including the ones with their own option."""
    settings = dict(arguments.settings)
    for name in ("block_size", "max_num_seqs"):
        if getattr(arguments, name) is not None:
            settings[name] = getattr(arguments, name)
    return settings


def rounded_dtype(arguments: argparse.Namespace, settings: Mapping[str, Setting]) -> str | None:
    """A dtype whose rounding may make different batches choose different tokens; None if unused.

    Args:
        settings: paxkv's settings.
    """
    of_settings = (settings.get(name, "auto") for name in _ROUNDING_SETTINGS)
    rounded = (dtype for dtype in (arguments.dtype, *of_settings) if dtype not in _NOT_ROUNDED)
    return next(rounded, None)


def chosen_workload(arguments: argparse.Namespace) -> Workload:
    """The workload that the options name.

    Raises:
        BenchmarkError: The workload has fewer than --num-requests requests.
    """
    vocab_size = MODEL_SHAPES[arguments.model].vocab_size
    workload = make_workload(arguments.workload, vocab_size=vocab_size, seed=arguments.seed)
    if arguments.num_requests is None:
        return workload
    # Otherwise rows would name requests that were not sent.
    if arguments.num_requests > len(workload.requests):
        raise BenchmarkError(
            f"--num-requests must be at most {len(workload.requests)}, the requests of "
            f"{workload.name}; got {arguments.num_requests}."
        )
    return workload.first(arguments.num_requests)


@contextlib.contextmanager
def work_folder(arguments: argparse.Namespace, workload: Workload) -> Iterator[Path]:
    """A temporary folder with `checkpoint/` and `workload.json`."""
    with tempfile.TemporaryDirectory(prefix="paxkv-benchmark-") as name:
        folder = Path(name)
        workload.write(folder / "workload.json")
        write_checkpoint(
            folder / "checkpoint",
            MODEL_SHAPES[arguments.model],
            seed=arguments.seed,
            dtype=arguments.dtype,
        )
        yield folder


def engine_spec(
    arguments: argparse.Namespace, folder: Path, module: str, settings: dict[str, Setting]
) -> EngineSpec:
    return EngineSpec(
        module=module,
        checkpoint=str(folder / "checkpoint"),
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        settings=settings,
    )


def case_of(arguments: argparse.Namespace, engine: str, settings: dict[str, Setting]) -> str:
    """All parameters of a run, as in "model=small workload=mixed ... engine=paxkv ..."."""
    fields: dict[str, Setting] = {
        "model": arguments.model,
        "workload": arguments.workload,
        "threads": arguments.threads,
        "dtype": arguments.dtype,
        "seed": arguments.seed,
        "engine": engine,
    }
    if arguments.num_requests is not None:
        fields["num_requests"] = arguments.num_requests
    return " ".join(f"{name}={value}" for name, value in (fields | settings).items())


def _num_processors() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def named_setting(text: str) -> tuple[str, Setting]:
    """ "block_size=32" -> ("block_size", 32); a value that is not JSON is a string."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
