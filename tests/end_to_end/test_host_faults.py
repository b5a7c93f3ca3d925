"""Two hosts whose processes are killed at random moments, while requests run.

`pytest -m slow -s tests/end_to_end/test_host_faults.py` prints how long the engine was away.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.end_to_end.real_server import ROOT, RealServer, running_server
from tests.end_to_end.test_several_hosts import free_port

NUM_KILLS = 50
NUM_CLIENTS = 3
# Longest time of a request, and of a restart.
DEADLINE_S = 600.0
FLAGS = (
    *("--tensor-parallel-size", "2", "--nnodes", "2", "--max-model-len", "128"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "64"),
)
# An engine that is ready counts as healthy, so each death is the first one in a row.
SERVER_FLAGS = ("--engine-restart-window-s", "0.01", "--max-engine-restarts", "2")
VARIABLES = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": "8"}
PROMPT = "What is a KV cache?"


@pytest.mark.slow
def test_every_request_ends_and_the_engine_returns_after_each_kill(tmp_path: Path) -> None:
    rng = random.Random(0)
    flags = (*FLAGS, "--master-port", str(free_port()), "--compilation-cache-dir", str(tmp_path))
    with (
        running_host_1(flags) as host,
        running_server(*flags, *SERVER_FLAGS, variables=VARIABLES) as server,
    ):
        expected = complete(server)
        outcomes: Counter[str] = Counter()
        away_s = []
        with running_clients(server, expected, outcomes):
            for kill_idx in range(NUM_KILLS):
                time.sleep(rng.uniform(0, 2))
                killed = (server.process, host)[kill_idx % 2]
                os.kill(engine_pid(killed), signal.SIGKILL)
                began_s = time.monotonic()
                time.sleep(0.1)
                while (found := try_to_complete(server)) != expected:
                    assert found.startswith("HTTP 503"), found
                    assert time.monotonic() - began_s < DEADLINE_S
                    time.sleep(0.1)
                away_s.append(time.monotonic() - began_s)
        print(
            f"\n{NUM_KILLS} kills: served again after {statistics.median(away_s):.1f} s (median), "
            f"{max(away_s):.1f} s at most; answers: {dict(outcomes)}"
        )
        assert outcomes.keys() <= {"answer", "HTTP 503"}
        assert min(outcomes.values()) > 0
        assert usage(server) == 0.0
        engines = [engine_pid(server.process), engine_pid(host)]
        assert server.stop() in (0, -signal.SIGTERM)
        # Host 1 ends with the server, without an error, and no process is left.
        assert host.wait(DEADLINE_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines)


@contextlib.contextmanager
def running_host_1(flags: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "paxkv.serve", *flags, "--node-rank", "1"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | VARIABLES)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_clients(server: RealServer, expected: str, outcomes: Counter[str]) -> Iterator[None]:
    """Clients that send one request after another, and count their outcomes."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            found = try_to_complete(server)
            outcomes["answer" if found == expected else found[: len("HTTP 503")]] += 1
            if found != expected:
                time.sleep(0.2)

    clients = [threading.Thread(target=run) for _ in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join(DEADLINE_S)
        assert not any(client.is_alive() for client in clients)


def engine_pid(process: subprocess.Popen[bytes]) -> int:
    """The engine process of a host's command; waits while it is being replaced."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += (task / "children").read_text().split()
        for pid in children:
            with contextlib.suppress(OSError):
                if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        time.sleep(0.05)
    raise TimeoutError("there is no engine process")


def try_to_complete(server: RealServer) -> str:
    try:
        return complete(server)
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code} {error.read().decode()}"


def complete(server: RealServer) -> str:
    body = {"model": "paxkv-demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)["choices"][0]["text"]


def usage(server: RealServer) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE_S) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith("vllm:kv_cache_usage_perc"))
    return float(line.split()[-1])
