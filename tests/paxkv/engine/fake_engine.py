"""An engine core with the real scheduler and a fake executor that samples known tokens."""

import ctypes
import sys
import time
from pathlib import Path

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from paxkv.engine.engine_core import EngineCore
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler

BLOCK_SIZE = 8


class FakeClock:
    """Replaces `time`, so that a test does not depend on the machine. Only `sleep` advances it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def perf_counter(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def time(self) -> float:
        return self.now_s


class FakeExecutor:
    """Samples the prompt of each request repeatedly: [1, 2, 3] -> 1, 2, 3, 1, 2, ...

    Args:
        step_s: How long the host waits for a step to be given to the device.
        device_step_s: How long the device computes each step of a burst, beside the host.
        fails_at_step: This step raises; None is never.
        hangs_at_step: This step never ends, and blocks all threads of the process.
        slow_file: Steps take `step_s` only while this file exists.
    """

    num_padded_tokens = 7
    num_corrupted_requests = 3
    num_compiles_after_ready = 0

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        step_s: float = 0.0,
        device_step_s: float = 0.0,
        fails_at_step: int | None,
        hangs_at_step: int | None = None,
        slow_file: str | None = None,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.rows: dict[str, EngineRequest] = {}
        self.num_steps = 0
        self.stats_of_features: dict[str, object] = {}
        self.num_decode_steps: list[int] = []
        self.num_in_flight = self.most_in_flight = 0
        self.profile_folder: str | None = None
        self._step_s = step_s
        self._device_step_s = device_step_s
        self._device_is_free_at_s = 0.0
        self._fails_at_step = fails_at_step
        self._hangs_at_step = hangs_at_step
        self._slow_file = slow_file

    def feature_stats(self, *, only_new: bool) -> dict[str, object]:
        return {} if only_new else self.stats_of_features

    def start_profile(self, folder: str) -> bool:
        was_idle = self.profile_folder is None
        self.profile_folder = self.profile_folder or folder
        return was_idle

    def stop_profile(self) -> bool:
        was_recording, self.profile_folder = self.profile_folder is not None, None
        return was_recording

    def close(self) -> None:
        """There are no other processes."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> "FakeStep":
        if self.num_steps == self._fails_at_step:
            raise RuntimeError("the device is on fire")
        while self.num_steps == self._hangs_at_step:
            print("the step hangs", file=sys.stderr, flush=True)
            ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock
        self.num_steps += 1
        self.num_decode_steps.append(scheduler_output.num_decode_steps)
        if self._slow_file is None or Path(self._slow_file).exists():
            time.sleep(self._step_s)
        for req_id in scheduler_output.finished_req_ids:
            self.rows.pop(req_id, None)
        cached = scheduler_output.scheduled_cached_reqs
        num_computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        num_outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            self.rows[new.req_id] = new
            num_computed[new.req_id], num_outputs[new.req_id] = new.num_computed_tokens, 0
        tokens, logprobs = [], []
        for req_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            prompt = self.rows[req_id].prompt_token_ids
            num_known = len(prompt) + num_outputs[req_id]
            is_burst = scheduler_output.num_decode_steps > 1
            num_given = 1 if is_burst else num_scheduled
            is_sampled = num_computed[req_id] + num_given == num_known
            num_sampled = num_scheduled if is_burst else 1
            first = num_outputs[req_id]
            # A burst does not check whether a token ends the request; the scheduler does.
            drawn = [prompt[(first + i) % len(prompt)] for i in range(num_sampled)]
            tokens.append(drawn if is_sampled else [])
            logprobs.append(self._logprobs(req_id, tokens[-1]))
        began_s = max(self._device_is_free_at_s, time.perf_counter())
        # A burst ends when all requests have ended, with token 0.
        num_computed = [drawn.index(0) + 1 if 0 in drawn else len(drawn) for drawn in tokens]
        device_s = max(1, *num_computed, 0) * self._device_step_s
        self._device_is_free_at_s = began_s + device_s
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return FakeStep(
            self,
            ModelRunnerOutput(
                req_ids=list(scheduler_output.num_scheduled_tokens),
                sampled_token_ids=tokens,
                logprobs=logprobs,
            ),
            self._device_is_free_at_s,
        )

    def _logprobs(self, req_id: str, token_ids: list[int]) -> list[TokenLogprobs] | None:
        if self.rows[req_id].sampling_params.logprobs is None:
            return None
        return [
            TokenLogprobs(
                token_logprob=-0.5, token_rank=1, top_token_ids=[i, 97], top_logprobs=[-0.5, -2.0]
            )
            for i in token_ids
        ]


class FakeStep:
    """A step with known tokens, which are returned when the device has finished."""

    needs_bitmask = False

    def __init__(self, executor: FakeExecutor, output: ModelRunnerOutput, done_at_s: float) -> None:
        self._executor = executor
        self._output = output
        self._done_at_s = done_at_s

    @property
    def is_done(self) -> bool:
        return time.perf_counter() >= self._done_at_s

    def sample_tokens(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._done_at_s - time.perf_counter()))
        self._executor.num_in_flight -= 1
        return self._output


def make_engine_core(
    *,
    num_blocks: int = 65,
    max_num_seqs: int = 64,
    max_model_len: int = 256,
    step_s: float = 0.0,
    device_step_s: float = 0.0,
    fails_at_step: int | None = None,
    hangs_at_step: int | None = None,
    slow_file: str | None = None,
    max_steps_in_flight: int = 1,
    max_decode_burst: int = 1,
) -> EngineCore:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_groups=(KVCacheGroupSpec(layer_names=("layers.0",), kv_cache_spec=spec),),
    )
    scheduler = (AsyncScheduler if max_steps_in_flight > 1 else Scheduler)(
        scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        kv_cache_config=kv_cache_config,
        max_model_len=max_model_len,
    )
    return EngineCore(
        scheduler,
        FakeExecutor(
            kv_cache_config,
            step_s=step_s,
            device_step_s=device_step_s,
            fails_at_step=fails_at_step,
            hangs_at_step=hangs_at_step,
            slow_file=slow_file,
        ),
        max_steps_in_flight=max_steps_in_flight,
        max_decode_burst=max_decode_burst,
    )


def make_request(
    request_id: str, prompt_token_ids: list[int], max_tokens: int = 4, **params: object
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=(0,),
    )
