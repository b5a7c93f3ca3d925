"""What HTTP and text cost: tokens per CPU-second of a server against `LLM.generate`.

    python -m benchmarks.serve.http_cost
    python -m benchmarks.serve.http_cost --workload skewed --repetitions 5 --set block_size=32

Both have the same random model, with a tokenizer of the same size, the same settings, and as many
processors. Offline, `LLM.generate` gets all prompts at once, as token ids, and makes no text of its
answers. Over HTTP, all requests are sent at once; their prompts are token ids, their answers are
streamed as text. They take turns, and forget cached prefixes in between.

CPU-seconds are those of all threads: of the offline process; of the server's process and the
engine's together, which are pinned to the same processors. The client's do not count. The cost is
the share of tokens per CPU-second that is lost on the way: 15 % is the most that is wanted.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

import httpx

from benchmarks.command_line import run_benchmark
from benchmarks.engine.measure import spread
from benchmarks.engine.offline_engine import EngineRun, Setting
from benchmarks.engine.options import (
    case_of,
    chosen_workload,
    engine_spec,
    make_parser,
    parse_options,
    paxkv_settings,
    work_folder,
)
from benchmarks.engine.paxkv_engine import kv_cache_bytes
from benchmarks.engine.process import EngineProcess, EngineProcessError, pinned
from benchmarks.engine.worker import WARM_UP_OUTPUT_TOKENS, WARM_UP_REQUESTS
from benchmarks.random_checkpoint import MODEL_SHAPES
from benchmarks.random_tokenizer import write_tokenizer
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.serve.completions_client import CompletionsClient, ServerError
from benchmarks.serve.load import send_load
from benchmarks.serve.request_inputs import RequestInput
from benchmarks.serve.server_process import ServerProcess, running_server
from benchmarks.tables import markdown_table
from benchmarks.workloads import Workload

BENCHMARK = "benchmarks.serve.http_cost"
OFFLINE_MODULE = "benchmarks.engine.llm_engine"
MAX_COST_PERCENT = 15.0
_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """One workload over HTTP.

    Args:
        server_cpu_s: Of the process that speaks HTTP.
        engine_cpu_s: Of the process that computes.
    """

    num_output_tokens: int
    wall_s: float
    server_cpu_s: float
    engine_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.num_output_tokens / (self.server_cpu_s + self.engine_cpu_s)


async def serve_workload(server: ServerProcess, workload: Workload) -> ServedRun:
    """Sends all requests at once and reads all answers.

    Raises:
        ServerError: One failed, or has not the length that was asked for.
    """
    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT_S) as admin:
        (await admin.post("/reset_prefix_cache")).raise_for_status()
    inputs = [
        RequestInput(prompt=request.prompt_token_ids, max_tokens=request.num_output_tokens)
        for request in workload.requests
    ]
    url = f"{server.url}/v1"
    async with CompletionsClient(url, api_key=None, timeout_s=_TIMEOUT_S) as client:
        fields = {"model": await client.first_model(), "temperature": 0.0, "ignore_eos": True}
        wall, before = time.perf_counter(), server.cpu_s()
        records = await send_load(
            client, inputs, fields, arrivals=[0.0] * len(inputs), max_concurrency=None
        )
        wall_s, after = time.perf_counter() - wall, server.cpu_s()
    for record in records:
        if record.error is not None:
            raise ServerError(f"a request failed: {record.error}")
        if record.num_output_tokens != record.num_asked_tokens:
            raise ServerError(
                f"an answer has {record.num_output_tokens} tokens; wanted "
                f"{record.num_asked_tokens}."
            )
    return ServedRun(
        num_output_tokens=sum(record.num_output_tokens for record in records),
        wall_s=wall_s,
        server_cpu_s=after["server"] - before["server"],
        engine_cpu_s=after["engine"] - before["engine"],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(f"python -m {BENCHMARK}", __doc__)
    parser.set_defaults(out=str(RESULTS_FOLDER / "serving.jsonl"))
    arguments = parse_options(parser, argv)
    try:
        offline, served = measure(arguments)
    except ServerError as error:
        print(f"{BENCHMARK}: error: {error}", file=sys.stderr)
        return 1
    rows = result_rows(arguments, offline, served)
    append_rows(rows, arguments.out)
    print(report(rows))
    return 0


def measure(arguments: argparse.Namespace) -> tuple[list[EngineRun], list[ServedRun]]:
    """Both in turn, repetition by repetition.

    Raises:
        EngineProcessError: `LLM.generate` failed.
        ServerError: The server did.
    """
    workload = chosen_workload(arguments)
    settings = paxkv_settings(arguments)
    offline, served = [], []
    with work_folder(arguments, workload) as folder, contextlib.ExitStack() as processes:
        write_tokenizer(folder / "checkpoint", MODEL_SHAPES[arguments.model].vocab_size)
        spec = engine_spec(arguments, folder, OFFLINE_MODULE, settings)
        num_bytes = kv_cache_bytes(spec, workload, settings)
        flags = server_flags(
            {"model": spec.checkpoint, "dtype": spec.dtype, "cpu_kv_cache_bytes": num_bytes}
            | settings
        )
        with pinned(arguments.threads):
            server = processes.enter_context(running_server(*flags, "--enable-admin"))
        log = folder / "offline.log"
        process = processes.enter_context(EngineProcess(spec, folder / "workload.json", log))
        process.run({}, is_warm_up=True)
        asyncio.run(serve_workload(server, workload.first(WARM_UP_REQUESTS, WARM_UP_OUTPUT_TOKENS)))
        for _ in range(arguments.repetitions):
            offline.append(process.run({}))
            served.append(asyncio.run(serve_workload(server, workload)))
    return offline, served


def server_flags(settings: dict[str, Setting]) -> list[str]:
    """{"block_size": 32, "batch_invariant": False} -> --block-size 32 --no-batch-invariant"""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def result_rows(
    arguments: argparse.Namespace, offline: Sequence[EngineRun], served: Sequence[ServedRun]
) -> list[ResultRow]:
    """The cost of each repetition is that of its two runs, which come one behind the other."""
    costs = [
        100 * (1 - ours.tokens_per_cpu_s / theirs.tokens_per_cpu_s)
        for ours, theirs in zip(served, offline, strict=True)
    ]
    values = {
        "offline_tokens_per_cpu_s": [run.tokens_per_cpu_s for run in offline],
        "served_tokens_per_cpu_s": [run.tokens_per_cpu_s for run in served],
        "cost_percent": costs,
        "offline_cpu_s": [run.cpu_s for run in offline],
        "engine_process_cpu_s": [run.engine_cpu_s for run in served],
        "server_process_cpu_s": [run.server_cpu_s for run in served],
        "offline_tokens_per_s": [run.tokens_per_s for run in offline],
        "served_tokens_per_s": [run.tokens_per_s for run in served],
    }
    return [
        ResultRow(
            benchmark=BENCHMARK,
            case=case_of(arguments, "paxkv", paxkv_settings(arguments)),
            metric=metric,
            values=of_metric,
            device=processor_name(),
        )
        for metric, of_metric in values.items()
    ]


def report(rows: Sequence[ResultRow]) -> str:
    lines = [[row.metric, spread(row.values)] for row in rows]
    (costs,) = (row.values for row in rows if row.metric == "cost_percent")
    cost = statistics.median(costs)
    verdict = "under" if cost < MAX_COST_PERCENT else "NOT under"
    return "\n".join(
        [
            rows[0].case,
            "",
            markdown_table(["metric", "value"], lines),
            "",
            f"HTTP and text cost {cost:.1f} % of the tokens per CPU-second: {verdict} the "
            f"{MAX_COST_PERCENT:g} % that are wanted at most.",
        ]
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(main, EngineProcessError))
