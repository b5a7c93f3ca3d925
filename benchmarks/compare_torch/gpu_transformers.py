"""transformers with one model on the device: continuous batching, decode, first tokens.

Set up as transformers does by itself: SDPA attention, or flash attention where it finds that for
continuous batching, and no compiled forward pass.
"""

import functools
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks.compare_torch.gpu_sizes import (
    equal_workload,
    sizes_of,
    throughput_workload,
    write_config,
)
from benchmarks.units.unit import Measured
from benchmarks.workloads import Workload

_WEIGHT_SEED = 0
# A run fails after this long without a finished request.
_RESULT_TIMEOUT_S = 120.0


@functools.cache
def transformers_model(model: str, is_rehearsal: bool) -> "TransformersModel":
    """One per process."""
    return TransformersModel(model, is_rehearsal)


class TransformersModel:
    """A model with random weights, drawn on the device."""

    def __init__(self, model: str, is_rehearsal: bool) -> None:
        self._sizes = sizes_of(is_rehearsal=is_rehearsal)
        self._device = torch.device("cpu" if is_rehearsal else "cuda")
        start_s = time.perf_counter()
        torch.manual_seed(_WEIGHT_SEED)
        with tempfile.TemporaryDirectory(prefix="paxkv-benchmark-") as folder:
            write_config(Path(folder), model, is_rehearsal=is_rehearsal)
            config = AutoConfig.from_pretrained(folder)
        dtype = torch.float32 if is_rehearsal else torch.bfloat16
        with self._device:
            made = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self._model: PreTrainedModel = made.eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._vocab_size = config.vocab_size
        self._wait()
        self._load_s = time.perf_counter() - start_s

    def load(self, seed: int) -> Measured:
        del seed
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return Measured(figures={"load_s": [self._load_s]}, details={"peer_versions": versions})

    def decode(self, num_reqs: int, seed: int) -> Measured:
        """A step of `generate`: the time of more tokens minus that of the first token."""
        num_steps = self._sizes.num_peer_steps
        prompts = self._prompts(num_reqs, self._sizes.decode_prompt, seed)
        self._timed(prompts, 2)
        step_s = [
            (self._timed(prompts, 1 + num_steps) - self._timed(prompts, 1)) / num_steps
            for _ in range(2)
        ]
        return Measured(
            figures={
                "step_ms": [1e3 * s for s in step_s],
                "tokens_per_s": [num_reqs / s for s in step_s],
            }
        )

    def first_token(self, prompt_len: int, seed: int) -> Measured:
        """One prompt, until its first token is on the host."""
        seconds = [
            self._timed(self._prompts(1, prompt_len, seed + repetition), 1)
            for repetition in range(self._sizes.num_repetitions + 1)
        ]
        return Measured(figures={"ttft_ms": [1e3 * s for s in seconds[1:]]})

    def throughput(self, seed: int) -> Measured:
        """The workload of all lengths through continuous batching."""
        workload = throughput_workload(self._sizes, vocab_size=self._vocab_size, seed=seed)
        is_cuda = self._device.type == "cuda"
        settings = ContinuousBatchingConfig(
            # By itself it would take most of a CPU's memory.
            num_blocks=None if is_cuda else 64,
            max_requests_per_batch=len(workload.requests),
        )
        hints = WorkloadHints(  # as `generate_batch` gives them to its manager
            max_prompt_length=max(len(r.prompt_token_ids) for r in workload.requests),
            max_generated_length=max(r.num_output_tokens for r in workload.requests),
            num_requests=len(workload.requests),
        )
        with self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=settings,
            warmup=is_cuda,
            workload_hints=hints,
        ) as manager:
            # The first run captures the graphs that the warm-up did not.
            first_s, *seconds = (self._run(manager, workload, str(i)) for i in range(2))
            attention = self._model.config._attn_implementation
        return Measured(
            figures={
                "tokens_per_s": [workload.num_output_tokens / s for s in seconds],
                "first_run_s": [first_s],
            },
            details={"attention": attention},
        )

    def _run(self, manager: ContinuousBatchingManager, workload: Workload, name: str) -> float:
        """Seconds for all requests."""
        start_s = time.perf_counter()
        for idx, request in enumerate(workload.requests):
            manager.add_request(
                request.prompt_token_ids,
                request_id=f"{name}.{idx}",
                max_new_tokens=request.num_output_tokens,
                eos_token_id=-1,
            )
        num_tokens = num_done = 0
        while num_done < len(workload.requests):
            result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
            if result is None or result.error is not None:
                reason = "no result" if result is None else result.error
                raise RuntimeError(f"transformers' continuous batching failed: {reason}")
            if result.is_finished():
                num_done += 1
                num_tokens += len(result.generated_tokens)
        if num_tokens != workload.num_output_tokens:
            raise ValueError(f"got {num_tokens} tokens, wanted {workload.num_output_tokens}.")
        return time.perf_counter() - start_s

    def _prompts(self, num_reqs: int, prompt_len: int, seed: int) -> torch.Tensor:
        workload = equal_workload(num_reqs, prompt_len, 1, vocab_size=self._vocab_size, seed=seed)
        prompts = [request.prompt_token_ids for request in workload.requests]
        return torch.tensor(prompts, device=self._device)  # i64[num_reqs, prompt_len]

    @torch.inference_mode()
    def _timed(self, prompts: torch.Tensor, num_new_tokens: int) -> float:
        """Generates new tokens for every prompt; seconds until the last one is on the host."""
        self._wait()
        start_s = time.perf_counter()
        output = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new_tokens,
            do_sample=False,
        )
        num_got = output.cpu().shape[1] - prompts.shape[1]
        if num_got != num_new_tokens:
            raise ValueError(f"got {num_got} new tokens, wanted {num_new_tokens}.")
        return time.perf_counter() - start_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
