"""Flags of the load generator."""

import argparse
import json
import math
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.command_line import (
    natural,
    natural_float,
    output_file,
    positive_float,
    positive_int,
    whole_number,
)
from benchmarks.result_rows import RESULTS_FOLDER
from benchmarks.serve.summary import BOUNDED

# Names of bounds in vLLM's benchmark.
_BOUND_SYNONYMS = {"e2el": "e2e"}
# Longer than any prompt; prompts are made in memory.
_MAX_TOKENS = 2**20
_num_tokens = whole_number(1, _MAX_TOKENS)


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", type=_base_url, default="http://127.0.0.1:8000/v1")
    server.add_argument(
        "--model", help="name of the model; by default, the first that the server lists"
    )
    server.add_argument("--device", default="not named", help="the server's chip, for the rows")
    server.add_argument(
        "--timeout-s",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="a request fails after this long without data (default: %(default)g)",
    )
    _add_load_flags(parser.add_argument_group("load"))
    _add_input_flags(parser.add_argument_group("inputs"))
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=natural_float, default=0.0)
    sampling.add_argument(
        "--ignore-eos",
        action="store_true",
        help="do not stop at end-of-sequence tokens, on servers that know the field",
    )
    sampling.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="further fields of every request's body",
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--goodput",
        type=_bound,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"bounds such as ttft:200 tpot:50; names: {', '.join(BOUNDED)}",
    )
    results.add_argument(
        "--out",
        type=output_file,
        default=str(RESULTS_FOLDER / "serving.jsonl"),
        help="file of JSON lines that rows are appended to",
    )
    results.add_argument(
        "--save-requests",
        type=output_file,
        metavar="FILE",
        help="append every request's times to this file of JSON lines",
    )
    return parser


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-prompts", type=positive_int, default=100, metavar="N")
    group.add_argument(
        "--request-rate",
        type=_rate,
        default=math.inf,
        metavar="R",
        help="requests per second; inf (the default) sends all at once",
    )
    group.add_argument(
        "--max-concurrency",
        type=positive_int,
        metavar="N",
        help="largest number of requests that run at once; no limit by default",
    )
    group.add_argument(
        "--num-warmups",
        type=natural,
        default=2,
        metavar="N",
        help="requests sent one by one before the clock starts",
    )
    group.add_argument("--num-repetitions", type=positive_int, default=1, metavar="N")
    group.add_argument(
        "--seed",
        type=natural,
        default=0,
        help="seed of prompts and arrivals; each repetition uses the next seed",
    )


def _add_input_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset", choices=("random", "shared-prefix", "sharegpt"), default="random"
    )
    group.add_argument("--random-input-len", type=_num_tokens, default=128, metavar="N")
    group.add_argument("--random-output-len", type=_num_tokens, default=64, metavar="N")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths vary from (1 - R) to (1 + R) times these; in [0, 1)",
    )
    group.add_argument(
        "--token-ids",
        type=whole_number(0, 2**31 - 1),
        nargs=2,
        default=[100, 700],
        metavar=("LOW", "HIGH"),
        help="random token ids are in [LOW, HIGH); the model must have them (default: 100 700)",
    )
    group.add_argument(
        "--shared-prefix-len", type=whole_number(0, _MAX_TOKENS), default=256, metavar="N"
    )
    group.add_argument(
        "--num-prefixes",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of shared prefixes; requests use them in turn",
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json, or its folder, that measures ShareGPT texts",
    )
    group.add_argument(
        "--sharegpt-output-len",
        type=positive_int,
        metavar="N",
        help="length of every output, instead of the answer's length in the file",
    )
    group.add_argument(
        "--sharegpt-max-len",
        type=positive_int,
        default=1024,
        metavar="N",
        help="omit conversations whose question and answer have more tokens together",
    )


def _rate(text: str) -> float:
    return math.inf if text == "inf" else positive_float(text)


def _base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        # `urlsplit` checks the port only when it is read.
        is_known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_known = False
    if not is_known:
        raise argparse.ArgumentTypeError(f"must be like http://127.0.0.1:8000/v1, got {text}")
    return text


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def _bound(text: str) -> tuple[str, float]:
    """ "ttft:200" -> ("ttft", 200.0)."""
    name, colon, bound_ms = text.partition(":")
    name = _BOUND_SYNONYMS.get(name, name)
    if not colon or name not in BOUNDED:
        raise argparse.ArgumentTypeError(f"{text}: wanted NAME:MS, NAME in {', '.join(BOUNDED)}")
    return name, positive_float(bound_ms)
