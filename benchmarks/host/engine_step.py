"""What the host does beside a device in steady decode, and how long the device waits for it.

All requests decode; nothing arrives and nothing ends. The engine's own thread is watched:

    host_ms_a_step       CPU time that it takes for a decode step, on the average: scheduling,
                         building inputs, launching, taking tokens home, and writing the message
                         that brings them to the client
    host_ms_median       the same of the step in the middle, or of a burst's steps
    host_percent         of the time between two steps
    device_idle_percent  time in which no step was computed, because none had been launched

What a device computes is not among it: XLA has threads of its own also where the device is the CPU.
But there they take the cores and the caches of the engine's thread, so that its own work takes
about twice the time that it takes beside another device, and more on a busy machine. Nearer to that
comes a model that needs few caches, with as many threads of XLA's as leave a core to the engine.

    python -m benchmarks.host.engine_step --num-requests 256
    python -m benchmarks.host.engine_step --num-requests 256 --model tiny --xla-threads 1
    python -m benchmarks.host.engine_step --num-requests 64 --set max_decode_burst=1 \
        --set async_scheduling=false
"""

import argparse
import gc
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.command_line import positive_int, run_benchmark, whole_number
from benchmarks.engine.measure import spread
from benchmarks.engine.options import named_setting
from benchmarks.engine.paxkv_engine import BYTES_PER_VALUE
from benchmarks.engine.settings import checked_settings, settings_by_part
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table
from models import read_model_config
from paxkv.build import build_core
from paxkv.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from paxkv.contracts import wire
from paxkv.contracts.engine_request import AbortRequests, AddRequest, EngineRequest
from paxkv.contracts.executor import Executor, StepHandle
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.engine.engine_core import EngineCore
from paxkv.runner.kv_cache_arrays import kv_cache_dtype
from paxkv.sampling_params import SamplingParams

BENCHMARK = "benchmarks.host.engine_step"
PROMPT_TOKENS = 64
MAX_MODEL_LEN = 2048
# Of each request, for the steps that are measured, bursts and blocks that are partly filled.
TOKENS_TO_SPARE = 448
# Decode steps before the clock starts: bursts have their length by then.
WARM_UP_STEPS = 24
# With these, and with bursts that go on past them, a request stays within `TOKENS_TO_SPARE`.
MAX_NUM_STEPS = 320
# Settings that cannot be chosen -> what says them.
_DECIDED_BY = {
    "model": "--model",
    "max_num_seqs": "--num-requests",
    "max_model_len": BENCHMARK,
    "data_parallel_size": f"{BENCHMARK}, which watches one engine",
}


class WatchedExecutor:
    """An executor whose steps are timed on the device, as seen from a thread that waits for each.

    `busy_s` is the time in which at least one step was launched and not done.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._launched: queue.SimpleQueue[tuple[float, jax.Array] | None] = queue.SimpleQueue()
        self.busy_s = 0.0
        self.num_decode_steps = 0
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        start_s = time.perf_counter()
        handle = self._executor.execute_model(scheduler_output)
        result = getattr(handle, "result", None)  # a step without tokens has none
        if result is not None:
            self._launched.put((start_s, result))
            self.num_decode_steps += scheduler_output.num_decode_steps
        return handle

    def stop_watching(self) -> None:
        """Ends the thread: Python's end aborts the process where one waits within XLA."""
        self._launched.put(None)
        self._watcher.join()

    def _watch(self) -> None:
        last_done_s = 0.0
        while (launched := self._launched.get()) is not None:
            start_s, result = launched
            jax.block_until_ready(result)
            done_s = time.perf_counter()
            self.busy_s += done_s - max(start_s, last_done_s)
            last_done_s = done_s


def measure(
    core: EngineCore, executor: WatchedExecutor, num_requests: int, num_steps: int
) -> dict[str, float]:
    """One run: requests are added, computed to steady decode, watched, and aborted."""
    rng = np.random.default_rng(0)
    for idx in range(num_requests):
        prompt = rng.integers(0, 1000, PROMPT_TOKENS).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - 128, ignore_eos=True)
        request = EngineRequest(
            request_id=str(idx), prompt_token_ids=prompt, sampling_params=params
        )
        core.handle(AddRequest(request=request))
    while core.make_stats().num_running_reqs < num_requests:
        core.step()
        if core.make_stats().num_preemptions:
            raise RuntimeError(f"{num_requests} requests do not fit the KV cache; give it more.")
    _run(core, executor, WARM_UP_STEPS)
    busy_s = executor.busy_s
    wall_s, host_s = time.perf_counter(), time.thread_time()
    step_times_s = _run(core, executor, num_steps)
    wall_s, host_s = time.perf_counter() - wall_s, time.thread_time() - host_s
    busy_s = executor.busy_s - busy_s
    num_done = len(step_times_s)
    core.handle(AbortRequests(request_ids=[str(idx) for idx in range(num_requests)]))
    while core.has_work:
        core.step()
    return {
        "host_ms_a_step": 1e3 * host_s / num_done,
        "host_ms_median": 1e3 * statistics.median(step_times_s),
        "step_ms": 1e3 * wall_s / num_done,
        "host_percent": 100 * host_s / wall_s,
        "device_idle_percent": max(0.0, 100 * (1 - busy_s / wall_s)),
    }


def _run(core: EngineCore, executor: WatchedExecutor, num_steps: int) -> list[float]:
    """Goes on for at least so many decode steps; CPU seconds of each, of a burst its share."""
    step_times_s: list[float] = []
    num_before, start_s = executor.num_decode_steps, time.thread_time()
    while len(step_times_s) < num_steps:
        # As the engine's loop does, which hears its clients meanwhile.
        while (spare_s := core.spare_s) > 0:
            time.sleep(spare_s)
        wire.encode(core.step())
        num_new = executor.num_decode_steps - num_before
        if num_new > 0:
            took_s = time.thread_time() - start_s
            step_times_s += [took_s / num_new] * num_new
            num_before, start_s = num_before + num_new, start_s + took_s
    return step_times_s


def build(checkpoint: Path, arguments: argparse.Namespace) -> tuple[EngineCore, WatchedExecutor]:
    """An engine with room for all requests."""
    parts = settings_by_part(dict(arguments.set))
    scheduler = {
        "max_num_seqs": arguments.num_requests,
        "max_num_batched_tokens": max(512, arguments.num_requests),
    }
    model = read_model_config(checkpoint)
    dtype = kv_cache_dtype("float32", "cpu", parts["cache"].get("kv_cache_dtype", "auto"))
    values_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    token_bytes = values_per_token * BYTES_PER_VALUE[dtype]
    # Nobody is preempted, and the longest request of the model must fit too.
    num_tokens = arguments.num_requests * (PROMPT_TOKENS + TOKENS_TO_SPARE) + MAX_MODEL_LEN
    parts["cache"] = {"cpu_kv_cache_bytes": num_tokens * token_bytes} | parts["cache"]
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoint), max_model_len=MAX_MODEL_LEN, **parts["model"]),
        cache=CacheConfig(**parts["cache"]),
        scheduler=SchedulerConfig(**(scheduler | parts["scheduler"])),
        runner=RunnerConfig(**parts["runner"]),
    )
    core = build_core(config, show_progress=True).core
    # Nothing of the engine's can be watched from outside without its executor.
    executor = core._executor = WatchedExecutor(core._executor)
    return core, executor


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {BENCHMARK}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=sorted(MODEL_SHAPES), default="small")
    parser.add_argument("--num-requests", type=positive_int, default=256)
    parser.add_argument(
        "--num-steps",
        type=whole_number(1, MAX_NUM_STEPS),
        default=64,
        help="decode steps of a repetition",
    )
    parser.add_argument("--repetitions", type=positive_int, default=3)
    parser.add_argument(
        *("--set",), type=named_setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of paxkv's",
    )  # fmt: skip
    parser.add_argument(
        *("--xla-threads",), type=positive_int, metavar="N",
        help="threads that XLA computes with; as many as there are cores if left out",
    )  # fmt: skip
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results")
    arguments = parser.parse_args(argv)
    checked_settings(parser, arguments.set, decided_by=_DECIDED_BY)
    if arguments.xla_threads is not None:
        # XLA looks for it when it makes its device.
        os.environ["NPROC"] = str(arguments.xla_threads)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", MODEL_SHAPES[arguments.model])
        core, executor = build(checkpoint, arguments)
    gc.freeze()  # as the engine's process does
    num_requests, num_steps = arguments.num_requests, arguments.num_steps
    try:
        runs = [
            measure(core, executor, num_requests, num_steps) for _ in range(arguments.repetitions)
        ]
    finally:
        executor.stop_watching()
        core.close()
    settings = " ".join(f"{name}={value}" for name, value in arguments.set)
    if arguments.xla_threads is not None:
        settings = f"xla_threads={arguments.xla_threads} {settings}"
    case = f"model={arguments.model} requests={arguments.num_requests} {settings}".strip()
    rows = [
        ResultRow(
            benchmark=BENCHMARK,
            case=case,
            metric=metric,
            values=[run[metric] for run in runs],
            device=processor_name(),
        )
        for metric in runs[0]
    ]
    print(case)
    print(markdown_table(["figure", "value"], [[r.metric, spread(r.values, 3)] for r in rows]))
    if arguments.save:
        append_rows(rows, RESULTS_FOLDER / "engine_step.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
