"""Starts the Ray application, sends streamed requests with shared prefixes, and kills a replica.

    python -m benchmarks.ray_replicas

Needs the extra `ray`. Each case starts `serve run paxkv.ray:app` with the demo model on this
machine. The prompts are random tokens: one of some shared prefixes, and a tail of their own.

- hit_percent: Prompt tokens that the engines found in their prefix caches, of all requests.
- num_complete: Streams that ended with `[DONE]`.
- num_error_events: Streams that ended with an error event in the form of the API.
- num_refused: Requests that were answered with another status than 200.
- num_broken: Requests that ended in another way: this must be 0.
- slowest_s: Time of the slowest request.
- recovered_s: After a replica was killed: time until two replicas report metrics again.
- num_orphans: Engine processes of a killed replica that still run 10 seconds later.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import http.client
import importlib.util
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.command_line import BenchmarkError, output_file, positive_int, run_benchmark
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table

_ROUND_ROBIN = "ray.serve.experimental.round_robin_router.RoundRobinRouter"
CASES = {
    "one replica": {"num_replicas": "1"},
    "two replicas round robin": {"num_replicas": "2", "request_router": _ROUND_ROBIN},
    "two replicas": {"num_replicas": "2"},
    "two replicas one killed": {"num_replicas": "2"},
}
# A cache of 80 blocks of 64 tokens holds about half of the prefixes.
_SETTINGS = {"num_gpu_blocks_override": "80", "max_num_seqs": "8", "max_num_batched_tokens": "256"}
_MARK = "PAXKV_BENCHMARK_RUN"
_ENGINE = b"paxkv.entrypoints.engine_process"
_START_S = 1200.0
_REQUEST_S = 300.0
_ORPHAN_S = 10.0
_SAMPLE = re.compile(r'^vllm:prefix_cache_(hits|queries)_total\{.*replica="(\w+)".*\} (\S+)$', re.M)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of a case.

    Args:
        max_tokens_killed: `max_tokens` in the case with a kill, so that streams run when it comes.
    """

    num_requests: int = 200
    num_concurrent: int = 6
    num_prefixes: int = 14
    prefix_tokens: int = 512
    tail_tokens: int = 32
    max_tokens: int = 16
    max_tokens_killed: int = 256


@dataclasses.dataclass(frozen=True, slots=True)
class RunningApplication:
    """A started application: its port, and the mark in the environment of its processes."""

    process: subprocess.Popen[bytes]
    port: int
    mark: str

    def prefix_counts(self) -> dict[str, dict[str, float]]:
        """Replica id -> its prefix cache's `hits` and `queries`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        counts: dict[str, dict[str, float]] = collections.defaultdict(dict)
        for name, replica, value in _SAMPLE.findall(page):
            counts[replica][name] = float(value)
        return counts

    def wait_for_replicas(self, num_replicas: int, timeout_s: float) -> float:
        """Waits until this number of replicas report metrics; returns the seconds that it took."""
        start_s = time.monotonic()
        while time.monotonic() < start_s + timeout_s:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if len(self.prefix_counts()) == num_replicas:
                    return time.monotonic() - start_s
            if self.process.poll() is not None:
                raise BenchmarkError("the application ended; its log says why.")
            time.sleep(0.2)
        raise BenchmarkError(f"{num_replicas} replicas were not ready within {timeout_s:g} s.")

    def engines(self) -> list[int]:
        """The ids of the application's engine processes."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    is_engine = _ENGINE in (folder / "cmdline").read_bytes()
                    if is_engine and self.mark.encode() in (folder / "environ").read_bytes():
                        found.append(int(folder.name))
        return found

    def kill_replica(self) -> int:
        """Kills the replica of one engine; returns the id of the engine."""
        engine = self.engines()[0]
        status = Path(f"/proc/{engine}/status").read_text()
        os.kill(int(re.search(r"^PPid:\s+(\d+)", status, re.M)[1]), signal.SIGKILL)
        return engine


@contextlib.contextmanager
def running_application(arguments: dict[str, str], log: Path) -> Iterator[RunningApplication]:
    """Starts the application and ends it with all of its processes."""
    mark = uuid.uuid4().hex
    words = [f"{name}={value}" for name, value in (_SETTINGS | arguments).items()]
    serve = Path(sys.executable).with_name("serve")
    with log.open("ab") as file:
        process = subprocess.Popen(
            [serve, "run", "paxkv.ray:app", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {_MARK: mark, "RAY_USAGE_STATS_ENABLED": "0"},
        )
    application = RunningApplication(process, 8000, mark)
    try:
        yield application
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for engine in application.engines():
            os.kill(engine, signal.SIGKILL)


def send_request(port: int, prompt: list[int], max_tokens: int) -> str:
    """Sends one streamed request; returns how it ended."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_REQUEST_S)
    try:
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            lines = [line for line in response.read().decode().split("\n") if line]
    except (OSError, http.client.HTTPException):
        return "broken"
    if response.status != 200:
        return "refused"
    if lines and lines[-1] == "data: [DONE]":
        return "complete" if len(lines) > 1 else "broken"
    is_error = bool(lines) and lines[-1].startswith('data: {"error":{"message":')
    return "error_events" if is_error else "broken"


def measure(name: str, workload: Workload, log: Path) -> dict[str, float]:
    """Runs one case; returns the figures by metric."""
    arguments = CASES[name]
    rng = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(10, 500) for _ in range(number)]

    prefixes = [tokens(workload.prefix_tokens) for _ in range(workload.num_prefixes)]
    prompts = [
        rng.choice(prefixes) + tokens(workload.tail_tokens) for _ in range(workload.num_requests)
    ]
    num_replicas = int(arguments["num_replicas"])
    kill_at, max_tokens = None, workload.max_tokens
    if "killed" in name:
        kill_at, max_tokens = workload.num_requests // 2, workload.max_tokens_killed
    figures: dict[str, float] = {}
    with running_application(arguments, log) as application:
        application.wait_for_replicas(num_replicas, _START_S)
        counter, killed, lock = itertools.count(), [], threading.Lock()
        seconds: list[float] = []

        def run(prompt: list[int]) -> str:
            with lock:
                if next(counter) == kill_at:
                    killed.append((application.kill_replica(), time.monotonic()))
            start_s = time.monotonic()
            ending = send_request(application.port, prompt, max_tokens)
            seconds.append(time.monotonic() - start_s)
            return ending

        with concurrent.futures.ThreadPoolExecutor(workload.num_concurrent) as pool:
            endings = collections.Counter(pool.map(run, prompts))
        for ending in ("complete", "error_events", "refused", "broken"):
            figures[f"num_{ending}"] = endings[ending]
        figures["slowest_s"] = max(seconds)
        if killed:
            ((engine, killed_s),) = killed
            application.wait_for_replicas(num_replicas, _START_S)
            figures["recovered_s"] = time.monotonic() - killed_s
            time.sleep(max(0.0, killed_s + _ORPHAN_S - time.monotonic()))
            figures["num_orphans"] = float(engine in application.engines())
        else:
            counts = application.prefix_counts().values()
            hits, queries = (sum(each[key] for each in counts) for key in ("hits", "queries"))
            figures["hit_percent"] = 100 * hits / queries
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ray_replicas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(Workload):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=positive_int, default=field.default, metavar="N")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--log", type=output_file, default="ray_replicas.log")
    out = str(RESULTS_FOLDER / "ray_replicas.jsonl")
    parser.add_argument("--out", type=output_file, default=out)
    arguments = vars(parser.parse_args(argv))
    cases, log, out = (arguments.pop(name) for name in ("cases", "log", "out"))
    if importlib.util.find_spec("ray") is None:
        raise BenchmarkError("Ray Serve is not installed. Install paxkv with the extra `ray`.")
    workload = Workload(**arguments)
    figures = {
        (f"replicas={case.replace(' ', '-')}", metric): value
        for case in cases
        for metric, value in measure(case, workload, log).items()
    }
    rows = [
        ResultRow(
            benchmark="benchmarks.ray_replicas",
            case=case,
            metric=metric,
            values=[value],
            device=processor_name(),
        )
        for (case, metric), value in figures.items()
    ]
    append_rows(rows, out)
    lines = [[row.metric, row.case, f"{row.median:,.1f}"] for row in rows]
    print(markdown_table(["figure", "case", "value"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
