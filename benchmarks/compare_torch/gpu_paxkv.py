"""paxkv's engine with one model on the device: throughput, steady decode, first tokens.

Weights are random and drawn on the device. Programs are compiled when they are first needed,
because warming up all programs of a large model would take longer than the measurements.
"""

import dataclasses
import functools
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.compare_torch.gpu_sizes import (
    Sizes,
    equal_workload,
    sizes_of,
    throughput_workload,
    write_config,
)
from benchmarks.units.unit import Measured
from benchmarks.workloads import Workload
from models import LoadedModel, load_model
from paxkv.config.engine_config import CacheConfig, Kernels, RunnerConfig, SchedulerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import AddRequest, EngineRequest
from paxkv.engine.engine_core import EngineCore
from paxkv.runner.memory.kv_cache_arrays import default_block_size
from paxkv.runner.model_runner import ModelRunner
from paxkv.scheduler.async_scheduler import AsyncScheduler

_WEIGHT_SEED = 0
_WARM_UP_TOKENS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """Totals of a run after one step of the engine."""

    end_s: float
    num_tokens: int
    num_started: int  # requests with a token
    num_finished: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One run of a workload; `token_ids` are in its order."""

    wall_s: float
    first_token_s: list[float]
    steps: list[EngineStep]
    token_ids: list[list[int]]


@functools.cache
def paxkv_model(model: str, kernels: Kernels, is_rehearsal: bool) -> "PaxkvModel":
    """One per process and choice of kernels; units of a process share its programs."""
    return PaxkvModel(model, kernels, sizes_of(is_rehearsal=is_rehearsal), is_rehearsal)


class PaxkvModel:
    """A runner with random weights.

    Args:
        kernels: As `--kernels` of the server.
    """

    def __init__(self, model: str, kernels: Kernels, sizes: Sizes, is_rehearsal: bool) -> None:
        self._sizes = sizes
        start_s = time.perf_counter()
        dtype = "float32" if is_rehearsal else "bfloat16"
        with tempfile.TemporaryDirectory(prefix="paxkv-benchmark-") as folder:
            write_config(Path(folder), model, is_rehearsal=is_rehearsal)
            loaded = load_model(folder, dtype=dtype, load_format="dummy", seed=_WEIGHT_SEED)
        self._weight_bytes = read_weight_bytes(loaded)
        self._vocab_size = loaded.config.vocab_size
        platform = next(iter(loaded.params[0].devices())).platform
        block_size = sizes.block_size or default_block_size(platform)
        self._scheduler_config = SchedulerConfig(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_decode_burst=sizes.max_decode_burst,
        )
        self._runner = ModelRunner(
            loaded,
            cache_config=CacheConfig(
                block_size=block_size,
                num_gpu_blocks_override=1 + sizes.num_cache_tokens // block_size,
            ),
            scheduler_config=self._scheduler_config,
            max_model_len=sizes.max_model_len,
            seed=_WEIGHT_SEED,
            runner_config=RunnerConfig(kernels=kernels),
        )
        self._num_runs = 0
        self._load_s = time.perf_counter() - start_s

    def load(self, seed: int) -> Measured:
        del seed
        return Measured(figures={"load_s": [self._load_s]})

    def throughput(self, seed: int) -> Measured:
        """The workload of all lengths; all requests arrive at once."""
        workload = throughput_workload(self._sizes, vocab_size=self._vocab_size, seed=seed)
        # The first run compiles.
        first, *runs = (self.run(workload, enable_prefix_caching=True) for _ in range(3))
        return Measured(
            figures={
                "tokens_per_s": [workload.num_output_tokens / run.wall_s for run in runs],
                "ttft_p50_ms": [1e3 * statistics.median(run.first_token_s) for run in runs],
                "first_run_s": [first.wall_s],
            }
        )

    def decode(self, num_reqs: int, seed: int) -> Measured:
        """Requests that decode together."""
        sizes = self._sizes
        workload = equal_workload(
            num_reqs,
            sizes.decode_prompt,
            sizes.num_decode_tokens,
            vocab_size=self._vocab_size,
            seed=seed,
        )
        self.run(workload.first(num_reqs, _WARM_UP_TOKENS), enable_prefix_caching=False)
        run = self.run(workload, enable_prefix_caching=False)
        # Every token attends to all before it, so the mean context is that of the middle token.
        context = sizes.decode_prompt + sizes.num_decode_tokens / 2
        kv_bytes = num_reqs * context * self._runner.memory_plan.token_bytes
        return Measured(
            figures=steady_decode(run.steps, num_reqs),
            details={"read_bytes_per_step": self._weight_bytes + kv_bytes},
        )

    def first_token(self, prompt_len: int, seed: int) -> Measured:
        """One prompt on an idle device; the first of the repetitions compiles."""
        seconds = []
        for repetition in range(self._sizes.num_repetitions + 1):
            prompt = equal_workload(
                1, prompt_len, 1, vocab_size=self._vocab_size, seed=seed + repetition
            )
            seconds.append(self.run(prompt, enable_prefix_caching=False).first_token_s[0])
        return Measured(figures={"ttft_ms": [1e3 * s for s in seconds[1:]]})

    def run(self, workload: Workload, *, enable_prefix_caching: bool) -> EngineRun:
        """Runs all requests with a new engine.

        Raises:
            ValueError: A request did not get as many tokens as it wants.
        """
        self._num_runs += 1
        core = EngineCore(
            AsyncScheduler(
                scheduler_config=self._scheduler_config,
                cache_config=CacheConfig(enable_prefix_caching=enable_prefix_caching),
                kv_cache_config=self._runner.kv_cache_config,
                max_model_len=self._sizes.max_model_len,
            ),
            self._runner,
            max_steps_in_flight=2,
            max_decode_burst=self._scheduler_config.max_decode_burst,
        )
        req_ids = [f"{self._num_runs}.{idx}" for idx in range(len(workload.requests))]
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
        first_token_s: dict[str, float] = {}
        token_ids: dict[str, list[int]] = {req_id: [] for req_id in req_ids}
        steps: list[EngineStep] = []
        num_finished = 0
        while core.has_work:
            outputs = core.step().outputs
            now_s = time.perf_counter() - start_s
            for output in outputs:
                if output.new_token_ids:
                    first_token_s.setdefault(output.request_id, now_s)
                    token_ids[output.request_id] += output.new_token_ids
                num_finished += output.finish_reason is not None
            steps.append(
                EngineStep(
                    end_s=now_s,
                    num_tokens=sum(map(len, token_ids.values())),
                    num_started=len(first_token_s),
                    num_finished=num_finished,
                )
            )
        wall_s = time.perf_counter() - start_s
        core.close()
        wanted = [request.num_output_tokens for request in workload.requests]
        got = [len(ids) for ids in token_ids.values()]
        if got != wanted:
            raise ValueError(f"output lengths are wrong: got {got}, wanted {wanted}.")
        return EngineRun(
            wall_s=wall_s,
            first_token_s=list(first_token_s.values()),
            steps=steps,
            token_ids=list(token_ids.values()),
        )


def steady_decode(steps: list[EngineStep], num_reqs: int) -> dict[str, list[float]]:
    """Figures of the steps in which all requests decode.

    Raises:
        ValueError: There are fewer than 3 such steps.
    """
    steady = [step for step in steps if step.num_started == num_reqs and not step.num_finished]
    if len(steady) < 3:
        raise ValueError(f"got {len(steady)} steps of steady decode, wanted at least 3.")
    # The first quarter is left out: bursts reach their length there.
    first, last = steady[len(steady) // 4], steady[-1]
    num_steps = (last.num_tokens - first.num_tokens) / num_reqs
    wall_s = last.end_s - first.end_s
    return {
        "step_ms": [1e3 * wall_s / num_steps],
        "tokens_per_s": [num_reqs * num_steps / wall_s],
    }


def read_weight_bytes(model: LoadedModel) -> int:
    """Bytes of weights that a step reads: all except an embedding table that is not the head."""
    has_head = any(name.startswith("lm_head") for name in model.param_names)
    return sum(
        param.nbytes
        for name, param in zip(model.param_names, model.params, strict=True)
        if not (has_head and name.startswith("embed_tokens"))
    )
