"""CPU time of an engine's steps while an inspector page is open, beside that without one.

Steady decode on an engine core with 100,000 blocks and a device that takes no time, so that the
share of a real engine's steps is smaller. The same steps are measured in turns, with the page
asking ten times a second and without it:

    python -m benchmarks.host.inspector_cost
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.contracts.engine_request import AddRequest, EngineRequest, UtilityCall
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.runner_output import ModelRunnerOutput
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.engine.engine_core import EngineCore
from paxkv.sampling_params import SamplingParams
from paxkv.scheduler.scheduler import Scheduler

NUM_BLOCKS = 100_000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 32_768
# Those of `paxkv/inspector/feed.py`.
PERIOD_S = 0.1
MAX_SHARE = 0.01


class InstantExecutor:
    """Draws token 7 for whoever has all tokens computed, at once."""

    num_padded_tokens = 0
    num_compiles_after_ready = 0

    def __init__(self, kv_cache_config: KVCacheConfig, scheduler: Scheduler) -> None:
        self.kv_cache_config = kv_cache_config
        self._scheduler = scheduler

    def execute_model(self, scheduler_output: SchedulerOutput) -> "InstantStep":
        requests = self._scheduler.requests
        req_ids = list(scheduler_output.num_scheduled_tokens)
        done = [requests[r].num_computed_tokens >= requests[r].num_tokens for r in req_ids]
        return InstantStep(
            ModelRunnerOutput(
                req_ids=req_ids,
                sampled_token_ids=[[7] if is_done else [] for is_done in done],
                logprobs=[None] * len(req_ids),
            )
        )


class InstantStep:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def sample_tokens(self) -> ModelRunnerOutput:
        return self._output


def make_core(num_running: int, num_prompt_tokens: int) -> EngineCore:
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
    core = EngineCore(scheduler, InstantExecutor(kv_cache_config, scheduler))
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
    """Asks as the server does: not more often than its share allows."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._seq = -1
        self._next_s = 0.0

    def ask_when_due(self) -> None:
        start_s = time.perf_counter()
        if start_s < self._next_s:
            return
        call = UtilityCall(call_id=0, method="inspect", arguments=(self._seq, False))
        reply = self._core.handle(call)
        self._seq = int(reply.result_json.partition('"seq":')[2].partition(",")[0])
        took_s = time.perf_counter() - start_s
        self._next_s = start_s + max(PERIOD_S, took_s / MAX_SHARE)


def measure(core: EngineCore, duration_s: float, page: Page | None) -> float:
    """CPU microseconds a step."""
    num_steps, start_s, start_ns = 0, time.perf_counter(), time.thread_time_ns()
    while time.perf_counter() - start_s < duration_s:
        core.step()
        num_steps += 1
        if page is not None:
            page.ask_when_due()
    return (time.thread_time_ns() - start_ns) / 1e3 / num_steps


def compare(
    num_running: int, num_prompt_tokens: int, duration_s: float, num_turns: int
) -> tuple[list[float], list[float]]:
    """Microseconds a step without and with the page, turn by turn.

    Steps grow dearer with their contexts, so that turns alternate.
    """
    core = make_core(num_running, num_prompt_tokens)
    without, with_page = [], []
    for _ in range(num_turns):
        page = Page(core)
        without.append(measure(core, duration_s, None))
        page.ask_when_due()
        with_page.append(measure(core, duration_s, page))
        # The lease of the recorder ends by itself, at a step after it.
        time.sleep(3.1)
        core.step()
    return without, with_page


def report(case: str, without: Sequence[float], with_page: Sequence[float]) -> str:
    ratio = statistics.median(b / a for a, b in zip(without, with_page, strict=True))
    return (
        f"{case:<44} {statistics.median(without):>9.1f} {statistics.median(with_page):>9.1f} "
        f"{100 * (ratio - 1):>+7.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--duration-s", type=float, default=2.0, help="of one turn")
    parser.add_argument("--num-turns", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'CPU microseconds a step':<44} {'without':>9} {'with page':>9} {'page':>9}")
    for num_running, num_prompt_tokens in ((16, 500), (64, 2_000), (256, 2_000), (256, 6_000)):
        times = compare(num_running, num_prompt_tokens, arguments.duration_s, arguments.num_turns)
        case = f"num_running={num_running} num_prompt_tokens={num_prompt_tokens}"
        print(report(case, *times), flush=True)


if __name__ == "__main__":
    main()
