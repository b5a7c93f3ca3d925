"""CPU time of an engine's steps while an inspector page is open, beside that without one.

Steady decode on an engine core with 100,000 blocks and a device that only waits. The last column
is what the page adds to a step, as a share of the step. With a device that takes no time at all,
blocks change half a million times a second, which no real one does:

    python -m benchmarks.host.inspector_cost
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import msgspec

from benchmarks.command_line import run_benchmark, whole_number
from paxkv.config.engine_config import CacheConfig, SchedulerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts import wire
from paxkv.contracts.engine_request import AddRequest, EngineRequest, UtilityCall
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.runner_output import ModelRunnerOutput
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.engine.engine_core import EngineCore
from paxkv.inspector.feed import MAX_PAUSE_S, MAX_SHARE, PERIOD_S
from paxkv.scheduler.scheduler import Scheduler

NUM_BLOCKS = 100_000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 32_768
# Of steps that are measured in one go.
STEPS_PER_SLICE = 400
# Running requests, tokens of each, and seconds of the device: 2 ms is a small model's step.
CASES = (
    (16, 500, 0.0),
    (64, 2_000, 0.0),
    (256, 2_000, 0.0),
    (256, 4_000, 0.0),
    (64, 2_000, 0.002),
    (256, 4_000, 0.002),
)


class KnownExecutor:
    """Draws token 7 for whoever has all tokens computed."""

    num_padded_tokens = 0
    num_compiles_after_ready = 0

    def __init__(self, kv_cache_config: KVCacheConfig, scheduler: Scheduler, step_s: float) -> None:
        self.kv_cache_config = kv_cache_config
        self._scheduler = scheduler
        self._step_s = step_s

    def execute_model(self, scheduler_output: SchedulerOutput) -> "KnownStep":
        requests = self._scheduler.requests
        req_ids = list(scheduler_output.num_scheduled_tokens)
        done = [requests[r].num_computed_tokens >= requests[r].num_tokens for r in req_ids]
        return KnownStep(
            ModelRunnerOutput(
                req_ids=req_ids,
                sampled_token_ids=[[7] if is_done else [] for is_done in done],
                logprobs=[None] * len(req_ids),
            ),
            self._step_s,
        )


class KnownStep:
    is_done = True  # all of its time is that of `sample_tokens`

    def __init__(self, output: ModelRunnerOutput, step_s: float) -> None:
        self._output = output
        self._step_s = step_s

    def sample_tokens(self) -> ModelRunnerOutput:
        if self._step_s:
            time.sleep(self._step_s)
        return self._output


def make_core(num_running: int, num_prompt_tokens: int, step_s: float) -> EngineCore:
    """Requests that decode, each with its own prompt computed."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    kv_cache_config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_groups=(KVCacheGroupSpec(layer_names=("layers.0",), kv_cache_spec=spec),),
    )
    scheduler = Scheduler(
        scheduler_config=SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=2**20),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        kv_cache_config=kv_cache_config,
        max_model_len=MAX_MODEL_LEN,
    )
    core = EngineCore(scheduler, KnownExecutor(kv_cache_config, scheduler, step_s))
    for i in range(num_running):
        request = EngineRequest(
            request_id=f"cmpl-{i:032d}-{i}",
            prompt_token_ids=[i] * num_prompt_tokens,
            sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN - num_prompt_tokens),
        )
        core.handle(AddRequest(request=request))
    for _ in range(3):
        core.step()
    return core


class Page:
    """Asks as the server does, with an answer's bytes as they travel."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._seq = -1
        self._next_s = 0.0

    def ask_when_due(self, now_s: float) -> None:
        """`now_s` counts this engine's own time."""
        if now_s < self._next_s:
            return
        call = UtilityCall(call_id=0, method="inspect", arguments=(self._seq, False))
        reply = self._core.handle(wire.decode_input(wire.encode(call)))
        wire.encode(reply)
        answer = msgspec.json.decode(reply.result_json, type=_Answer)
        self._seq = answer.seq
        pause_s = 0.0 if answer.snapshot else answer.took_s / MAX_SHARE
        self._next_s = now_s + min(max(PERIOD_S, pause_s), MAX_PAUSE_S)


class _Answer(msgspec.Struct):
    seq: int
    took_s: float
    snapshot: dict[str, msgspec.Raw] | None


def measure(core: EngineCore, num_steps: int, page: Page | None, now_s: float) -> float:
    """CPU microseconds a step."""
    start_s, start_ns = time.perf_counter(), time.thread_time_ns()
    for _ in range(num_steps):
        core.step()
        if page is not None:
            page.ask_when_due(now_s + time.perf_counter() - start_s)
    return (time.thread_time_ns() - start_ns) / 1e3 / num_steps


def compare(
    num_running: int, num_prompt_tokens: int, step_s: float, num_slices: int
) -> tuple[list[float], list[float]]:
    """CPU microseconds a step without and with the page, slice by slice.

    Two equal engines take turns of some steps, so that both meet the same machine.
    """
    plain, inspected = (make_core(num_running, num_prompt_tokens, step_s) for _ in range(2))
    page, now_s = Page(inspected), 0.0
    page.ask_when_due(now_s)
    without, with_page = [], []
    for _ in range(num_slices):
        without.append(measure(plain, STEPS_PER_SLICE, None, 0.0))
        start_s = time.perf_counter()
        with_page.append(measure(inspected, STEPS_PER_SLICE, page, now_s))
        now_s += time.perf_counter() - start_s
    return without, with_page


def report(case: str, without: Sequence[float], with_page: Sequence[float], step_s: float) -> str:
    # Means: what is done ten times a second is in few slices. Of the quieter ones: the machine has
    # other work.
    plain_us, page_us = (
        statistics.mean(sorted(v)[: 3 * len(v) // 4]) for v in (without, with_page)
    )
    share = (page_us - plain_us) / (plain_us + 1e6 * step_s)
    return f"{case:<58} {plain_us:>9.1f} {page_us:>9.1f} {100 * share:>+9.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.inspector_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--num-slices", type=whole_number(2), default=24, help="of 400 steps each")
    arguments = parser.parse_args()
    print(f"{'CPU microseconds a step':<58} {'without':>9} {'with page':>9} {'of a step':>11}")
    for num_running, num_prompt_tokens, step_s in CASES:
        times = compare(num_running, num_prompt_tokens, step_s, arguments.num_slices)
        case = f"{num_running} running, {num_prompt_tokens} tokens each, device {step_s * 1e3:g} ms"
        print(report(case, *times, step_s), flush=True)
    print(f"a snapshot of {NUM_BLOCKS} blocks: {measure_snapshot():.1f} ms, once a page opens")


def measure_snapshot() -> float:
    """CPU milliseconds."""
    core = make_core(64, 6_000, 0.0)
    times = []
    for _ in range(9):
        start_ns = time.thread_time_ns()
        core.handle(UtilityCall(call_id=0, method="inspect", arguments=(-1, True)))
        times.append((time.thread_time_ns() - start_ns) / 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
