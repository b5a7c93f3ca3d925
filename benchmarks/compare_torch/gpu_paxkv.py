"""paxkv's engine with one model on the device.

Weights are random and drawn on the device. Programs are compiled when they are first needed,
because warming up all programs of a large model would take longer than the measurements.
"""

import itertools
import tempfile
import time
from pathlib import Path

from benchmarks.compare_torch.gpu_subject import EngineStep, Subject, write_config
from benchmarks.units.unit import Measured
from benchmarks.workloads import Workload
from models import load_model
from paxkv.config.engine_config import CacheConfig, SchedulerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import AddRequest, EngineRequest
from paxkv.engine.engine_core import EngineCore
from paxkv.runner.model_runner import ModelRunner
from paxkv.scheduler.async_scheduler import AsyncScheduler

_WEIGHT_SEED = 0


class PaxkvModel(Subject):
    def __init__(self, model: str, is_rehearsal: bool) -> None:
        super().__init__(is_rehearsal=is_rehearsal)
        sizes = self.sizes
        dtype = "float32" if is_rehearsal else "bfloat16"
        with tempfile.TemporaryDirectory(prefix="paxkv-benchmark-") as folder:
            write_config(Path(folder), model, is_rehearsal=is_rehearsal)
            loaded = load_model(folder, dtype=dtype, load_format="dummy", seed=_WEIGHT_SEED)
        self.vocab_size = loaded.config.vocab_size
        block_size = sizes.block_size or loaded.platform.block_size
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
        )
        self._request_numbers = itertools.count()

    def throughput(self, seed: int) -> Measured:
        """The workload of all lengths; all requests arrive at once."""
        workload = self.throughput_workload(seed)
        # The first run compiles.
        seconds = [self.run(workload)[-1].end_s for _ in range(3)][1:]
        return Measured(figures={"tokens_per_s": [workload.num_output_tokens / s for s in seconds]})

    def run(self, workload: Workload) -> list[EngineStep]:
        """Runs all requests with a new engine.

        Raises:
            ValueError: A request did not get as many tokens as it wants.
        """
        core = EngineCore(
            AsyncScheduler(
                scheduler_config=self._scheduler_config,
                cache_config=CacheConfig(),
                kv_cache_config=self._runner.kv_cache_config,
                max_model_len=self.sizes.max_model_len,
            ),
            self._runner,
            max_steps_in_flight=2,
            max_decode_burst=self._scheduler_config.max_decode_burst,
        )
        # No two runs share an id, because all use one runner.
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
        num_made = dict.fromkeys(req_ids, 0)
        num_finished = 0
        steps: list[EngineStep] = []
        while core.has_work:
            for output in core.step().outputs:
                num_made[output.request_id] += len(output.new_token_ids)
                num_finished += output.finish_reason is not None
            steps.append(
                EngineStep(
                    end_s=time.perf_counter() - start_s,
                    num_tokens=sum(num_made.values()),
                    num_started=sum(map(bool, num_made.values())),
                    num_finished=num_finished,
                )
            )
        core.close()
        wanted = [request.num_output_tokens for request in workload.requests]
        got = list(num_made.values())
        if got != wanted:
            raise ValueError(f"output lengths are wrong: got {got}, wanted {wanted}.")
        return steps
