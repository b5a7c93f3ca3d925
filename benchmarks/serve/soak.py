"""A soak test: streams on the demo model for minutes, then bursts of requests.

    python -m benchmarks.serve.soak
    python -m benchmarks.serve.soak --duration-s 20 --num-burst-requests 500 -- --max-num-seqs 32

Answers all requests with `LLM.generate` first, then starts `python -m paxkv.serve` with the flags
after `--`. In the first part, each of --num-streams clients sends its next request after an answer,
for --duration-s. In the second part, --burst-size requests are sent at once, again and again, up to
--num-burst-requests. All answers are streamed.

Both parts count failed requests, and answers that differ from the offline ones. During the first
part, the memory of the server's and the engine's process is measured once per second. Its growth is
measured in the second half of this part, from the median of the first fifth to the median of the
last fifth. The number of requests in the server is also read once per second. If it is far below
--num-streams, this program limits the load. Latencies are measured in this program, so they include
its own delay, `streams_client_lag_ms_p99`. At the end, the idle server must hold no request and no
block. The exit code is 1 if a request failed, an answer differs, the server still holds a request
or a block, or memory grew by 2 % or more.

Most answers are sampled. Rounding may change one in about 100,000 tokens, and rounding depends on
the other requests of a step. --batch-invariant applies to the server and to `LLM.generate`, and
removes that dependence: then the answers must be equal. Steps take longer.
"""

import argparse
import asyncio
import dataclasses
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
import numpy as np

from benchmarks.command_line import (
    natural,
    output_file,
    positive_float,
    positive_int,
    run_benchmark,
    seed_number,
)
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.serve.completions_client import CompletionsClient, ServerError
from benchmarks.serve.request_record import RequestRecord
from benchmarks.serve.server_process import ServerProcess, running_server
from benchmarks.serve.soak_requests import SoakRequest, answer_offline, make_requests
from benchmarks.serve.summary import summarize
from benchmarks.tables import markdown_table

MAX_GROWTH_PERCENT = 2.0
_TIMEOUT_S = 300.0
_SAMPLE_EVERY_S = 1.0
_LAG_EVERY_S = 0.02
_IDLE_WITHIN_S = 30.0
_MODEL = "paxkv-demo"
_NUM_SHOWN = 3
_AT_ONCE = ("vllm:num_requests_running", "vllm:num_requests_waiting")
# Metrics that are 0 on an idle server.
HELD = (
    *_AT_ONCE,
    "vllm:kv_cache_usage_perc",
    "paxkv_compiles_after_ready_total",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """The result of both parts.

    Args:
        figures: Name with unit -> value.
        errors: Reason of failures -> number of requests.
        differing: Requests whose answer differs from the offline one, and that answer.
        held: The metrics in `HELD` at the end.
    """

    figures: Mapping[str, float]
    errors: Mapping[str, int]
    differing: Sequence[tuple[SoakRequest, str]]
    held: Mapping[str, float]

    @property
    def failures(self) -> list[str]:
        """Failures in words; empty if the soak test passed."""
        failures = [f"{count} x {error}" for error, count in self.errors.items()]
        if self.differing:
            failures.append(f"{len(self.differing)} answers differ from LLM.generate")
        failures += [
            f"{name} is {value:g} at the end" for name, value in self.held.items() if value
        ]
        failures += [
            f"{name} is {value:.2f}, wanted less than {MAX_GROWTH_PERCENT:g}"
            for name, value in self.figures.items()
            if name.endswith("_growth_percent") and value >= MAX_GROWTH_PERCENT
        ]
        return failures


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoakSize:
    """The amount of load; see the command line."""

    num_streams: int
    duration_s: float
    num_burst_requests: int
    burst_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The server at one moment; `num_requests` counts running and waiting requests."""

    resident_bytes: Mapping[str, int]
    num_requests: float


_Answered = list[tuple[SoakRequest, RequestRecord]]


async def soak(
    server: ServerProcess, requests: Sequence[SoakRequest], size: SoakSize
) -> SoakResult:
    """Runs both parts; `requests` include their answers."""
    samples: list[_Sample] = []
    lags_s: list[float] = []
    watchers = [
        asyncio.create_task(_watch(server, samples)),
        asyncio.create_task(_watch_own_lag(lags_s)),
    ]
    streamed = await _stream(server.url, requests, size)
    for watcher in watchers:
        watcher.cancel()
    for ended in await asyncio.gather(*watchers, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    in_bursts = await _send_bursts(server.url, requests, size)
    answered = streamed + in_bursts
    return SoakResult(
        figures=_figures(streamed, "streams")
        | _figures(in_bursts, "bursts")
        | _watched_figures(samples)
        | {"streams_client_lag_ms_p99": 1e3 * float(np.percentile(lags_s, 99))},
        errors=Counter(record.error for _, record in answered if record.error is not None),
        differing=[
            (request, record.text)
            for request, record in answered
            if record.error is None and record.text != request.answer
        ],
        held=await _held(server),
    )


async def _stream(url: str, requests: Sequence[SoakRequest], size: SoakSize) -> _Answered:
    """Runs clients that each send one request at a time, until the time is over."""
    answered: _Answered = []
    start = time.perf_counter()

    async def run_client(client: CompletionsClient, index: int) -> None:
        # Clients begin at different requests, and each sends all requests in turn.
        position = index * len(requests) // size.num_streams
        while time.perf_counter() - start < size.duration_s:
            request = requests[position % len(requests)]
            answered.append((request, await _complete(client, request, start)))
            position += 1

    async with _client(url) as client:
        await asyncio.gather(*(run_client(client, index) for index in range(size.num_streams)))
    return answered


async def _send_bursts(url: str, requests: Sequence[SoakRequest], size: SoakSize) -> _Answered:
    """Sends many requests at once, each on a new connection, and repeats after all answers."""
    answered: _Answered = []
    start = time.perf_counter()
    for first in range(0, size.num_burst_requests, size.burst_size):
        last = min(first + size.burst_size, size.num_burst_requests)
        burst = [requests[index % len(requests)] for index in range(first, last)]
        async with _client(url) as client:
            records = await asyncio.gather(*(_complete(client, r, start) for r in burst))
        answered += zip(burst, records, strict=True)
    return answered


def _client(url: str) -> CompletionsClient:
    return CompletionsClient(f"{url}/v1", api_key=None, timeout_s=_TIMEOUT_S)


async def _complete(client: CompletionsClient, request: SoakRequest, start: float) -> RequestRecord:
    fields = {"model": _MODEL} | request.fields
    return await client.complete(request.input, fields, start=start)


async def _watch(server: ServerProcess, samples: list[_Sample]) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S) as client:
        while True:
            text = (await client.get("/metrics")).raise_for_status().text
            samples.append(
                _Sample(
                    resident_bytes=server.resident_bytes(),
                    num_requests=sum(_metric(text, name) for name in _AT_ONCE),
                )
            )
            await asyncio.sleep(_SAMPLE_EVERY_S)


async def _watch_own_lag(lags_s: list[float]) -> None:
    """Records how late this program wakes up. The measured times include this delay."""
    while True:
        due = time.perf_counter() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        lags_s.append(time.perf_counter() - due)


async def _held(server: ServerProcess) -> dict[str, float]:
    """The metrics in `HELD`, as soon as all are 0, or after `_IDLE_WITHIN_S`."""
    deadline = time.perf_counter() + _IDLE_WITHIN_S
    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S) as client:
        while True:
            text = (await client.get("/metrics")).raise_for_status().text
            held = {name: _metric(text, name) for name in HELD}
            if not any(held.values()) or time.perf_counter() > deadline:
                return held
            await asyncio.sleep(_SAMPLE_EVERY_S)


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    if found is None:
        raise ServerError(f"/metrics has no {name}.")
    return float(found.group(1))


def _figures(answered: _Answered, part: str) -> dict[str, float]:
    """Figures of one part; empty without requests."""
    if not answered:
        return {}
    summary = summarize([record for _, record in answered], {}, has_arrivals=False)
    return {f"{part}_{name}": value for name, value in summary.figures.items()}


def _watched_figures(samples: Sequence[_Sample]) -> dict[str, float]:
    """Figures of the first part: requests in the server, memory at the end and its growth."""
    last_half = samples[len(samples) // 2 :]
    num_samples = max(1, len(last_half) // 5)
    at_once = statistics.median(sample.num_requests for sample in last_half)
    figures = {"streams_requests_at_once": at_once}
    for name in last_half[0].resident_bytes:
        resident = [sample.resident_bytes[name] for sample in last_half]
        before = statistics.median(resident[:num_samples])
        after = statistics.median(resident[-num_samples:])
        figures[f"{name}_resident_mb"] = after / 1e6
        figures[f"{name}_growth_percent"] = 100 * (after / before - 1)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    flags = list(arguments.server_flags)
    if arguments.batch_invariant:
        flags.append("--batch-invariant")
    requests = answer_offline(
        make_requests(arguments.num_different, arguments.seed),
        batch_invariant=arguments.batch_invariant,
    )
    size = SoakSize(
        num_streams=arguments.num_streams,
        duration_s=arguments.duration_s,
        num_burst_requests=arguments.num_burst_requests,
        burst_size=arguments.burst_size,
    )
    try:
        with running_server(*flags) as server:
            result = asyncio.run(soak(server, requests, size))
            exit_code = server.stop()
    except (ServerError, httpx.HTTPError) as error:
        print(f"benchmarks.serve.soak: error: {error}", file=sys.stderr)
        return 1
    append_rows(result_rows(arguments, result), arguments.out)
    print(report(result))
    return 1 if exit_code or result.failures else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--num-streams", type=positive_int, default=256, metavar="N")
    parser.add_argument("--duration-s", type=positive_float, default=120.0, metavar="S")
    parser.add_argument("--num-burst-requests", type=natural, default=5000, metavar="N")
    parser.add_argument("--burst-size", type=positive_int, default=500, metavar="N")
    parser.add_argument(
        "--num-different",
        type=positive_int,
        default=1024,
        metavar="N",
        help="number of different requests",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="see above")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the requests")
    parser.add_argument(
        "--out",
        type=output_file,
        default=str(RESULTS_FOLDER / "serving.jsonl"),
        help="file of JSON lines to append rows to",
    )
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="flags of the server")
    return parser


def report(result: SoakResult) -> str:
    """A Markdown table of all figures, examples of wrong answers, and the failures."""
    figures = [[name, f"{value:,.2f}"] for name, value in result.figures.items()]
    figures += [[f"{name} at the end", f"{value:g}"] for name, value in result.held.items()]
    lines = [markdown_table(["figure", "value"], figures)]
    for request, text in result.differing[:_NUM_SHOWN]:
        lines += ["", f"asked:  {request.prompt!r}, {request.fields}"]
        lines += [f"wanted: {request.answer!r}", f"got:    {text!r}"]
    lines += ["", *(result.failures or ["No failures."])]
    return "\n".join(lines)


def result_rows(arguments: argparse.Namespace, result: SoakResult) -> list[ResultRow]:
    names = ("num_streams", "duration_s", "num_burst_requests", "burst_size", "num_different")
    case = " ".join(f"{name}={getattr(arguments, name)}" for name in (*names, "batch_invariant"))
    counts = {
        "failed_requests": sum(result.errors.values()),
        "answers_that_differ": len(result.differing),
    }
    return [
        ResultRow(
            benchmark="benchmarks.serve.soak",
            case=" ".join(["model=demo", case, *arguments.server_flags]),
            metric=metric,
            values=[value],
            device=processor_name(),
        )
        for metric, value in (result.figures | counts).items()
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
