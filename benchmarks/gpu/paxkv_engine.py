"""paxkv's scheduler and engine over a runner: throughput, prefix cache, steady decode.

Imported late, because it needs packages that a bare GPU machine lacks (see `packages.py`).
"""

import dataclasses
import statistics
import time

from benchmarks.gpu.paxkv_steps import Figures, check_lengths
from benchmarks.gpu.sizes import Sizes, equal_workload, prefix_workload, throughput_workload
from benchmarks.workloads import Workload
from paxkv.config.engine_config import CacheConfig, SchedulerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import AddRequest, EngineRequest
from paxkv.contracts.executor import StepHandle
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.runner_output import ModelRunnerOutput
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.engine.engine_core import EngineCore
from paxkv.runner.model_runner import ModelRunner
from paxkv.scheduler.async_scheduler import AsyncScheduler


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """What was known after a step of the engine."""

    end_s: float
    waited_s: float  # for the device, since the run began
    num_tokens: int  # made since the run began
    num_started: int  # requests that have a token
    num_finished: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One run of a workload.

    Args:
        token_ids: New tokens of each request, in the order of the workload.
    """

    wall_s: float
    ttft_s: list[float]
    steps: list[EngineStep]
    num_output_tokens: int
    token_ids: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s


class WaitingExecutor:
    """An executor that counts how long its caller waits for tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.waited_s = 0.0

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        return self._runner.kv_cache_config

    @property
    def num_padded_tokens(self) -> int:
        return self._runner.num_padded_tokens

    @property
    def num_compiles_after_ready(self) -> int:
        return self._runner.num_compiles_after_ready

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        return _WaitingStep(self, self._runner.execute_model(scheduler_output))


class _WaitingStep:
    def __init__(self, executor: WaitingExecutor, handle: StepHandle) -> None:
        self._executor = executor
        self._handle = handle

    @property
    def is_done(self) -> bool:
        return self._handle.is_done

    def sample_tokens(self) -> ModelRunnerOutput:
        start_s = time.perf_counter()
        output = self._handle.sample_tokens()
        self._executor.waited_s += time.perf_counter() - start_s
        return output


class PaxkvEngine:
    """Measures engines over one runner, a fresh one for every run.

    Args:
        scheduler_config, max_model_len: What the runner was built with.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sizes: Sizes,
        *,
        vocab_size: int,
        scheduler_config: SchedulerConfig,
        max_model_len: int,
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._scheduler_config = scheduler_config
        self._max_model_len = max_model_len
        self._num_runs = 0

    def throughput(self, *, seed: int) -> Figures:
        """The workload of all lengths; all requests come at once."""
        workload = throughput_workload(self._sizes, vocab_size=self._vocab_size, seed=seed)
        # The first compiles what was not needed before.
        _, *runs = (self.run(workload, enable_prefix_caching=True) for _ in range(3))
        return {
            "tokens_per_s": [run.tokens_per_s for run in runs],
            "ttft_p50_ms": [1e3 * statistics.median(run.ttft_s) for run in runs],
        }

    def prefix(self, *, seed: int) -> Figures:
        """Prompts with one beginning, in turn with and without the prefix cache."""
        workload = prefix_workload(self._sizes, vocab_size=self._vocab_size, seed=seed)
        rates: dict[bool, list[float]] = {True: [], False: []}
        for enable_prefix_caching in rates:  # compiles what was not needed before
            self.run(workload, enable_prefix_caching=enable_prefix_caching)
        for enable_prefix_caching in (True, False) * self._sizes.num_repetitions:
            run = self.run(workload, enable_prefix_caching=enable_prefix_caching)
            rates[enable_prefix_caching].append(run.tokens_per_s)
        return {
            "cache_on_tokens_per_s": rates[True],
            "cache_off_tokens_per_s": rates[False],
            "cache_on_times_off": [
                on / off for on, off in zip(rates[True], rates[False], strict=True)
            ],
        }

    def decode(self, *, num_reqs: int, seed: int) -> Figures:
        """So many requests that decode together, from the first token of the last to the first end.

        The contexts are those of the decode measurement of the steps alone.
        """
        workload = equal_workload(
            num_reqs,
            self._sizes.decode_prompt,
            self._sizes.num_decode_steps + 2,
            vocab_size=self._vocab_size,
            seed=seed,
        )
        run = self.run(workload, enable_prefix_caching=False)
        steady = [
            step for step in run.steps if step.num_started == num_reqs and not step.num_finished
        ]
        if len(steady) < 3:
            raise ValueError(f"got {len(steady)} steps of steady decode, wanted at least 3.")
        # Bursts are still short, and the first of them was measured to find their length.
        first, last = steady[len(steady) // 4], steady[-1]
        num_steps = (last.num_tokens - first.num_tokens) / num_reqs
        wall_s, waited_s = last.end_s - first.end_s, last.waited_s - first.waited_s
        return {
            "step_ms": [1e3 * wall_s / num_steps],
            "tokens_per_s": [(last.num_tokens - first.num_tokens) / wall_s],
            "host_ms_per_step": [1e3 * (wall_s - waited_s) / num_steps],
        }

    def run(self, workload: Workload, *, enable_prefix_caching: bool) -> EngineRun:
        """All requests at once, until the last has all its tokens.

        Raises:
            ValueError: One got too few, or too many.
        """
        self._num_runs += 1
        executor = WaitingExecutor(self._runner)
        core = self._make_core(executor, enable_prefix_caching=enable_prefix_caching)
        req_ids = [f"engine-{self._num_runs}.{idx}" for idx in range(len(workload.requests))]
        start_s = time.perf_counter()
        for req_id, request in zip(req_ids, workload.requests, strict=True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            core.handle(
                AddRequest(
                    request=EngineRequest(
                        request_id=req_id,
                        prompt_token_ids=request.prompt_token_ids,
                        sampling_params=params,
                    )
                )
            )
        first_s: dict[str, float] = {}
        token_ids: dict[str, list[int]] = {}
        steps: list[EngineStep] = []
        num_tokens = num_finished = 0
        while core.has_work:
            outputs = core.step().outputs
            now_s = time.perf_counter() - start_s
            for output in outputs:
                if not output.new_token_ids:
                    continue
                first_s.setdefault(output.request_id, now_s)
                token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
                num_tokens += len(output.new_token_ids)
                num_finished += output.finish_reason is not None  # by its length, with a token
            steps.append(
                EngineStep(
                    end_s=now_s,
                    waited_s=executor.waited_s,
                    num_tokens=num_tokens,
                    num_started=len(first_s),
                    num_finished=num_finished,
                )
            )
        wall_s = time.perf_counter() - start_s
        core.close()
        check_lengths(workload, list(token_ids.values()))
        return EngineRun(
            wall_s=wall_s,
            ttft_s=list(first_s.values()),
            steps=steps,
            num_output_tokens=workload.num_output_tokens,
            token_ids=[token_ids[req_id] for req_id in req_ids],
        )

    def _make_core(self, executor: WaitingExecutor, *, enable_prefix_caching: bool) -> EngineCore:
        scheduler = AsyncScheduler(
            scheduler_config=self._scheduler_config,
            cache_config=CacheConfig(enable_prefix_caching=enable_prefix_caching),
            kv_cache_config=executor.kv_cache_config,
            max_model_len=self._max_model_len,
        )
        return EngineCore(
            scheduler,
            executor,
            max_steps_in_flight=2,
            max_decode_burst=self._scheduler_config.max_decode_burst,
        )
