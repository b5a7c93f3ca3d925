"""transformers with one model on the same device: static and continuous batching, first tokens.

As transformers sets them up by itself: SDPA attention, or flash attention where it finds that for
continuous batching; no compiled forward pass.
"""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

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

from benchmarks.gpu.sizes import (
    equal_workload,
    sizes_of,
    throughput_workload,
    write_config,
)
from benchmarks.workloads import Workload

SEED = 0
# Without any finished request for so long, a run has failed.
_RESULT_TIMEOUT_S = 120.0
_MAX_FIRST_RUN_S = 20.0


class TorchSubject:
    """A model with random weights, drawn on the device."""

    def __init__(self, *, model: str, is_rehearsal: bool) -> None:
        self._sizes = sizes_of(is_rehearsal=is_rehearsal)
        self._device = torch.device("cpu" if is_rehearsal else "cuda")
        start_s = time.perf_counter()
        torch.manual_seed(SEED)
        with tempfile.TemporaryDirectory(prefix="paxkv-benchmark-") as name:
            write_config(Path(name), model, is_rehearsal=is_rehearsal)
            config = AutoConfig.from_pretrained(name)
        dtype = torch.float32 if is_rehearsal else torch.bfloat16
        with self._device:
            made = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self._model: PreTrainedModel = made.eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._vocab_size = config.vocab_size
        self._wait()
        self._load_s = time.perf_counter() - start_s

    def load(self) -> dict[str, Any]:
        """What came of making it: the constructor has done the work."""
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        return {"figures": {"load_s": [self._load_s]}, "notes": [versions]}

    def decode(self, *, num_reqs: int, seed: int) -> dict[str, Any]:
        """A step of `generate`: what more tokens take, over what one token takes."""
        sizes = self._sizes
        input_ids = self._prompts(num_reqs, sizes.decode_prompt, seed)
        self._generate(input_ids, 2)
        step_s = []
        for _ in range(2):
            prompt_s = self._timed(input_ids, 1)
            step_s.append(self._timed(input_ids, 1 + sizes.num_peer_steps) - prompt_s)
        step_s = [s / sizes.num_peer_steps for s in step_s]
        return {
            "figures": {
                "step_ms": [1e3 * s for s in step_s],
                "tokens_per_s": [num_reqs / s for s in step_s],
            }
        }

    def first_token(self, *, prompt_len: int, seed: int) -> dict[str, Any]:
        """One prompt, until its first token is on the host."""
        seconds = [
            self._timed(self._prompts(1, prompt_len, seed + repetition), 1)
            for repetition in range(self._sizes.num_repetitions + 1)
        ]
        return {"figures": {"ttft_ms": [1e3 * s for s in seconds[1:]]}}

    def static_batches(self, *, batch_size: int, seed: int) -> dict[str, Any]:
        """The workload of all lengths; a batch runs until its longest output is made."""
        workload = throughput_workload(self._sizes, vocab_size=self._vocab_size, seed=seed)
        self._generate(self._prompts(batch_size, self._sizes.decode_prompt, seed), 2)
        start_s = time.perf_counter()
        for start in range(0, len(workload.requests), batch_size):
            self._static_batch(
                Workload(name="batch", requests=workload.requests[start : start + batch_size])
            )
        wall_s = time.perf_counter() - start_s
        return {"figures": {"tokens_per_s": [workload.num_output_tokens / wall_s]}}

    def continuous_batching(self, *, seed: int) -> dict[str, Any]:
        """The workload of all lengths, with transformers' own choice of memory and batch.

        Its warm-up is not timed.
        """
        workload = throughput_workload(self._sizes, vocab_size=self._vocab_size, seed=seed)
        # On a CPU it would take most of the machine's memory by itself.
        num_blocks = None if self._device.type == "cuda" else 64
        settings = ContinuousBatchingConfig(
            num_blocks=num_blocks, max_requests_per_batch=len(workload.requests)
        )
        # What `generate_batch` tells its manager.
        hints = WorkloadHints(
            max_prompt_length=max(len(r.prompt_token_ids) for r in workload.requests),
            max_generated_length=max(r.num_output_tokens for r in workload.requests),
            num_requests=len(workload.requests),
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
        with self._model.continuous_batching_context_manager(
            generation_config=greedy,
            continuous_batching_config=settings,
            warmup=self._device.type == "cuda",
            workload_hints=hints,
        ) as manager:
            # The first run captures what its warm-up did not, and counts only if it takes long.
            seconds = [self._run_continuous(manager, workload, "0")]
            if seconds[0] < _MAX_FIRST_RUN_S:
                seconds.append(self._run_continuous(manager, _reversed(workload), "1"))
            attention = self._model.config._attn_implementation
        notes = [f"continuous batching used {attention} attention"]
        notes += [
            f"run {idx} of continuous batching took {s:.2f} s" for idx, s in enumerate(seconds)
        ]
        return {
            "figures": {"tokens_per_s": [workload.num_output_tokens / seconds[-1]]},
            "notes": notes,
        }

    def _run_continuous(
        self, manager: ContinuousBatchingManager, workload: Workload, name: str
    ) -> float:
        """Seconds of all requests."""
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

    def _static_batch(self, workload: Workload) -> None:
        prompts = [request.prompt_token_ids for request in workload.requests]
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        most = max(request.num_output_tokens for request in workload.requests)
        self._generate(padded.to(self._device), most, mask.to(self._device))

    def _prompts(self, num_reqs: int, prompt_len: int, seed: int) -> torch.Tensor:
        workload = equal_workload(num_reqs, prompt_len, 1, vocab_size=self._vocab_size, seed=seed)
        prompts = [request.prompt_token_ids for request in workload.requests]
        return torch.tensor(prompts, device=self._device)  # i64[num_reqs, prompt_len]

    def _timed(self, input_ids: torch.Tensor, num_new_tokens: int) -> float:
        self._wait()
        start_s = time.perf_counter()
        self._generate(input_ids, num_new_tokens)
        return time.perf_counter() - start_s

    @torch.inference_mode()
    def _generate(
        self, input_ids: torch.Tensor, num_new_tokens: int, mask: torch.Tensor | None = None
    ) -> list[list[int]]:
        """New tokens, on the host."""
        output_ids = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids) if mask is None else mask,
            max_new_tokens=num_new_tokens,
            do_sample=False,
        )
        token_ids = output_ids[:, input_ids.shape[1] :].tolist()
        num_got = min(map(len, token_ids))
        if num_got != num_new_tokens:
            raise ValueError(f"got {num_got} new tokens, wanted {num_new_tokens}.")
        return token_ids

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _reversed(workload: Workload) -> Workload:
    """The same work with other prompts: no run finds another's prefixes in a cache."""
    requests = [
        dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[::-1])
        for request in workload.requests
    ]
    return dataclasses.replace(workload, requests=requests)
