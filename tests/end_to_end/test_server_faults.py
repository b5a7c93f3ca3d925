"""The real server with the demo model, while its processes are killed and its files are broken.

All of it takes minutes: pytest -m slow tests/end_to_end/test_server_faults.py

Where each fault that the server promises to bear is scripted, and what then holds:

fault                          scripted in                promise
client vanishes mid-stream     test_demo_server.py        others get their answers, no block is held
half a request, then silence   test_demo_server.py, test_deadline_protocol.py
                                                          408 in time, others go on
10,000 connections, most idle  test_http_server.py (slow) others are served at once
engine SIGKILLed under load    here, test_build_client.py error, 503, a new engine, no block held
engine hangs under load        here, test_build_client.py error, 503, a new engine, no block held
SIGTERM under load             here, test_build_client.py all finish, exit code 0
server SIGKILLed under load    here                       no engine stays behind
port taken                     here, test_serve.py        one line, exit code 1, nothing loaded
checkpoint truncated, NaN      here                       one line, exit code 1
disk full for the trace        here, test_trace_file.py   all finish, one line, no block held
two servers, one cache folder  here                       same answers, what lies there is whole
"""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

import models.demo
from paxkv.trace.trace_file import TraceReader
from tests.end_to_end.demo_prompts import demo_conversations
from tests.end_to_end.real_server import ROOT, RealServer, running_server
from tests.end_to_end.test_demo_server import MODEL, metric, stream_answer
from tests.paxkv.fake_server import only_child
from tests.paxkv.fleet.test_engine_process import wait_for_end

pytestmark = pytest.mark.slow

NUM_STREAMS = 64
# Few programs, so that a start is short; most of the streams wait for others.
MEDIUM = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-model-len", "512")
SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "128")


def wait_for_health(server: RealServer, status: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while httpx.get(f"{server.url}/health", timeout=60).status_code != status:
        assert time.monotonic() < deadline, f"/health never became {status}"
        time.sleep(0.02)


def wait_for_requests(server: RealServer, num_requests: int) -> None:
    """Waits until the engine has this many requests."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    deadline = time.monotonic() + 120
    while sum(metric(server, name) for name in names) < num_requests:
        assert time.monotonic() < deadline, f"there were never {num_requests} requests at once"
        time.sleep(0.02)


async def answers(server: RealServer, **fields: object) -> list[str | BaseException]:
    """Answers to all conversations at once, or what ended them."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        return await asyncio.gather(
            *(
                stream_answer(client, messages, **fields)
                for messages in demo_conversations(NUM_STREAMS)
            ),
            return_exceptions=True,
        )


def test_engine_killed_under_64_streams_is_replaced_and_holds_no_block() -> None:
    with running_server(*MEDIUM) as server, ThreadPoolExecutor(1) as pool:
        before = asyncio.run(answers(server, max_tokens=24))
        assert all(isinstance(answer, str) for answer in before)
        for _ in range(2):
            long = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
            running = pool.submit(lambda fields=long: asyncio.run(answers(server, **fields)))
            wait_for_requests(server, NUM_STREAMS)
            os.kill(only_child(server.process.pid), signal.SIGKILL)
            wait_for_health(server, 503, 60)
            for ended in running.result(240):
                assert isinstance(ended, openai.APIError), ended
                assert "SIGKILL" in str(ended)
            wait_for_health(server, 200, 240)
            assert metric(server, "vllm:kv_cache_usage_perc") == 0
            assert asyncio.run(answers(server, max_tokens=24)) == before
            assert metric(server, "vllm:kv_cache_usage_perc") == 0
            assert metric(server, "paxkv_compiles_after_ready_total") == 0
        engine_pid = only_child(server.process.pid)
        assert server.stop() == 0
        wait_for_end(engine_pid)


def test_engine_that_hangs_under_64_streams_is_replaced_and_holds_no_block() -> None:
    flags = (*MEDIUM, "--execute-model-timeout-s", "3")
    with running_server(*flags) as server, ThreadPoolExecutor(1) as pool:
        before = asyncio.run(answers(server, max_tokens=24))
        long = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
        running = pool.submit(lambda: asyncio.run(answers(server, **long)))
        wait_for_requests(server, NUM_STREAMS)
        engine_pid = only_child(server.process.pid)
        os.kill(engine_pid, signal.SIGSTOP)
        wait_for_health(server, 503, 60)
        for ended in running.result(60):
            assert isinstance(ended, openai.APIError) and "it hangs" in str(ended), ended
        wait_for_health(server, 200, 240)
        assert only_child(server.process.pid) != engine_pid
        assert asyncio.run(answers(server, max_tokens=24)) == before
        assert metric(server, "vllm:kv_cache_usage_perc") == 0
        assert server.stop() == 0


def test_sigterm_under_64_streams_lets_all_finish() -> None:
    flags = (*MEDIUM, "--shutdown-timeout-s", "120")
    with running_server(*flags) as server, ThreadPoolExecutor(1) as pool:
        fields = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
        running = pool.submit(lambda: asyncio.run(answers(server, **fields)))
        wait_for_requests(server, NUM_STREAMS)
        engine_pid = only_child(server.process.pid)
        server.process.terminate()
        ended = running.result(240)
        assert [type(answer) for answer in ended] == [str] * NUM_STREAMS
        assert server.process.wait(120) == 0
        wait_for_end(engine_pid)


def test_engine_of_a_killed_server_ends_under_load() -> None:
    with running_server(*SMALL) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(answers(server, max_tokens=100)))
        wait_for_requests(server, 1)
        engine_pid = only_child(server.process.pid)
        server.process.kill()
        wait_for_end(engine_pid)
        running.result(240)


def test_two_servers_fill_one_cache_folder_at_once(tmp_path: Path) -> None:
    flags = (*SMALL, "--compilation-cache-dir", str(tmp_path))

    def ask() -> str:
        with running_server(*flags) as server:
            body = {"model": MODEL, "prompt": "What is 2 + 2?", "max_tokens": 8, "temperature": 0}
            response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert metric(server, "vllm:kv_cache_usage_perc") == 0
            assert server.stop() == 0
            return response.json()["choices"][0]["text"]

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(ask) for _ in range(2))
        assert first.result() == second.result()
    # What they left there is whole.
    assert ask() == first.result()
    assert not list(tmp_path.rglob("*.being-written"))


def test_taken_port_leaves_the_server_there_alone() -> None:
    with running_server(*SMALL) as server:
        port = server.url.rpartition(":")[2]
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "paxkv.serve", "--port", port],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        # No model is loaded first.
        assert time.monotonic() - start < 20
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("paxkv: error: ") and f":{port}" in line and "in use" in line
        body = {"model": MODEL, "prompt": "What is 2 + 2?", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
        assert server.stop() == 0


def test_full_disk_ends_the_trace_in_one_line_and_no_request(tmp_path: Path) -> None:
    trace, log = tmp_path / "trace", tmp_path / "log"
    flags = (*MEDIUM, "--trace-file", str(trace), "--disable-uvicorn-access-log")
    with log.open("wb") as stderr, running_server(*flags, stderr=stderr) as server:
        before = asyncio.run(answers(server, max_tokens=24))
        engine_pid = only_child(server.process.pid)
        # Writing beyond fails as on a full disk: some steps on, in the middle of a line. The log is
        # far shorter.
        most_bytes = trace.stat().st_size + 20_001
        resource.prlimit(engine_pid, resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        assert asyncio.run(answers(server, max_tokens=24)) == before
        assert trace.stat().st_size == most_bytes
        assert metric(server, "vllm:kv_cache_usage_perc") == 0
        assert only_child(server.process.pid) == engine_pid
        assert server.stop() == 0
    (line,) = (line for line in log.read_text().splitlines() if "trace" in line.lower())
    assert "the trace ends here, it cannot be written" in line
    # What is there can be replayed, and says where it ends.
    reader = TraceReader.open(trace)
    assert sum(1 for _ in reader.lines()) > 10
    assert reader.cut_off_line is not None


def truncate(weights: Path) -> None:
    os.truncate(weights, weights.stat().st_size // 2)


def put_nan(weights: Path) -> None:
    content = load_file(weights)
    content["model.layers.0.mlp.up_proj.weight"][1, 1] = np.nan
    save_file(content, weights)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (truncate, "truncated or not a safetensors file"),
        (put_nan, "'model.layers.0.mlp.up_proj.weight' has 1 of"),
        (lambda weights: weights.unlink(), "has neither model.safetensors nor"),
    ],
)
def test_broken_checkpoint_is_one_line_and_exit_code_1(tmp_path: Path, break_it, words) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(models.demo.__file__).parent / "checkpoint", folder)
    break_it(folder / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "paxkv.serve", "--port", "0", "--model", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("paxkv: error: ") and words in line
