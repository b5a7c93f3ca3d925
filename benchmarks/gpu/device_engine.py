"""paxkv's engine on the default device, in this process, without a server's warm-up.

A program is compiled when it is first needed. A warm-up of all programs of a large model would take
longer than the measurements.
"""

import contextlib
import dataclasses
import itertools
import time
from unittest import mock

from benchmarks.gpu.subject import EngineStep, Sizes
from benchmarks.workloads import Workload
from models import LoadedModel
from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import AddRequest, EngineRequest
from paxkv.engine.engine_core import EngineCore
from paxkv.runner import model_runner
from paxkv.runner.model_runner import ModelRunner
from paxkv.runner.programs.kernel_check import KernelChoice
from paxkv.scheduler.async_scheduler import AsyncScheduler

_SEED = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """A finished run.

    Args:
        token_ids: All new tokens of each request, in the order of the workload.
    """

    steps: list[EngineStep]
    token_ids: list[list[int]]


class DeviceEngine:
    """A loaded model with memory for its cache.

    Args:
        implementation: The body of every op. With "default", the engine chooses as in a server.

    Attributes:
        chosen: The engine's choice of a body for all ops; None if each op chooses for itself.
    """

    def __init__(
        self, model: LoadedModel, sizes: Sizes, *, implementation: str = "default"
    ) -> None:
        block_size = sizes.block_size or model.platform.block_size
        self._max_model_len = sizes.max_model_len
        self._scheduler_config = SchedulerConfig(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_decode_burst=sizes.max_decode_burst,
        )
        with contextlib.ExitStack() as stack:
            if implementation != "default":
                # A named body raises an error when the engine would otherwise fall back to XLA.
                choice = KernelChoice(implementation)
                choose = mock.Mock(return_value=choice)
                stack.enter_context(
                    mock.patch.object(model_runner, "choose_implementation", choose)
                )
            self._runner = ModelRunner(
                model,
                cache_config=CacheConfig(
                    block_size=block_size,
                    num_gpu_blocks_override=1 + sizes.num_cache_tokens // block_size,
                ),
                scheduler_config=self._scheduler_config,
                max_model_len=sizes.max_model_len,
                seed=_SEED,
            )
        self.chosen = self._runner.kernel_choice.implementation
        self._request_numbers = itertools.count()

    def run(self, workload: Workload) -> DeviceRun:
        """Runs all requests with a new engine and an empty prefix cache.

        Raises:
            ValueError: A request did not get the number of tokens that the workload specifies.
        """
        core = EngineCore(
            AsyncScheduler(
                scheduler_config=self._scheduler_config,
                cache_config=CacheConfig(),
                kv_cache_config=self._runner.kv_cache_config,
                max_model_len=self._max_model_len,
            ),
            self._runner,
            max_steps_in_flight=2,
            max_decode_burst=self._scheduler_config.max_decode_burst,
        )
        # Ids differ between runs, because all runs use one runner.
        req_ids = [str(next(self._request_numbers)) for _ in workload.requests]
        start_s = time.perf_counter()
        for req_id, request in zip(req_ids, workload.requests, strict=True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            engine_request = EngineRequest(
                request_id=req_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=params,
            )
            core.handle(AddRequest(request=engine_request))
        made: dict[str, list[int]] = {req_id: [] for req_id in req_ids}
        num_finished = 0
        steps: list[EngineStep] = []
        while core.has_work:
            for output in core.step().outputs:
                made[output.request_id] += output.new_token_ids
                num_finished += output.finish_reason is not None
            steps.append(
                EngineStep(
                    end_s=time.perf_counter() - start_s,
                    num_tokens=sum(map(len, made.values())),
                    num_started=sum(map(bool, made.values())),
                    num_finished=num_finished,
                )
            )
        core.close()
        wanted = [request.num_output_tokens for request in workload.requests]
        got = list(map(len, made.values()))
        if got != wanted:
            raise ValueError(f"output lengths are wrong: got {got}, wanted {wanted}.")
        return DeviceRun(steps=steps, token_ids=list(made.values()))
