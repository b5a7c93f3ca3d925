"""Measures transformers with one model on the device.

The model has transformers' default settings: attention is SDPA, or flash attention if transformers
finds it for continuous batching, and the forward pass is not compiled. Requests of one shape are
run by `generate`.
"""

import tempfile
import time
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks.compare_torch.continuous_batching import run_requests
from benchmarks.gpu.subject import EngineStep, Subject, write_config
from benchmarks.units.unit import Measured
from benchmarks.workloads import Workload

_WEIGHT_SEED = 0


class TransformersModel(Subject):
    def __init__(self, model: str, is_rehearsal: bool) -> None:
        super().__init__(is_rehearsal=is_rehearsal)
        self._device = torch.device("cpu" if is_rehearsal else "cuda")
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
        self.vocab_size = config.vocab_size

    def throughput(self, seed: int) -> Measured:
        """Measures tokens per second of continuous batching with requests of many lengths."""
        workload = self.throughput_workload(seed)
        is_cuda = self._device.type == "cuda"
        settings = ContinuousBatchingConfig(
            # The default number of blocks fills most of the memory of a machine without a GPU.
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
            # The first run captures graphs that the warm-up missed. The second run is measured.
            for name in ("first", "second"):
                start_s = time.perf_counter()
                num_tokens = sum(map(len, run_requests(manager, workload, name)))
                wall_s = time.perf_counter() - start_s
                if num_tokens != workload.num_output_tokens:
                    wanted = workload.num_output_tokens
                    raise ValueError(f"got {num_tokens} tokens, wanted {wanted}.")
            attention = self._model.config._attn_implementation
        return Measured(
            figures={"tokens_per_s": [workload.num_output_tokens / wall_s]},
            details={"attention": attention},
        )

    @torch.inference_mode()
    def run(self, workload: Workload) -> list[EngineStep]:
        """Runs requests with prompts of one length and outputs of one length as one batch."""
        prompts = [request.prompt_token_ids for request in workload.requests]
        token_ids = torch.tensor(prompts, device=self._device)  # i64[num_reqs, prompt_len]
        num_reqs, prompt_len = token_ids.shape
        num_new_tokens = workload.requests[0].num_output_tokens
        steps: list[EngineStep] = []

        def record(token_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """A stopping criterion that never stops; `generate` calls it after each token."""
            self._wait()
            num_made = token_ids.shape[1] - prompt_len
            steps.append(
                EngineStep(
                    end_s=time.perf_counter() - start_s,
                    num_tokens=num_reqs * num_made,
                    num_started=num_reqs,
                    num_finished=num_reqs * (num_made == num_new_tokens),
                )
            )
            return torch.zeros(num_reqs, dtype=torch.bool, device=self._device)

        self._wait()
        start_s = time.perf_counter()
        self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_new_tokens,
            do_sample=False,
            stopping_criteria=[record],
        )
        return steps

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
