"""The models and workloads for measurements on a GPU, and measurements of any engine."""

import abc
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.units.unit import Measured
from benchmarks.workloads import Workload, uniform_requests

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_BASE = {
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Fields of config.json, as published with the weights.
MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _BASE | _LLAMA,
    "qwen3-0.6b": _BASE | _QWEN3,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the engine and of the workloads.

    Args:
        block_size: The KV cache's block size; None for the device's default.
        decode_batches: Numbers of requests that decode together, one measurement each.
        decode_prompt, num_decode_tokens: Prompt and output tokens of each of these requests.
        throughput_prompts, throughput_outputs: Least and most tokens of uniform lengths.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_decode_burst: int = 8
    max_model_len: int = 2560
    block_size: int | None = None
    num_cache_tokens: int = 2**18
    decode_batches: tuple[int, ...] = (64, 256, 1)
    decode_prompt: int = 512
    num_decode_tokens: int = 192
    num_warm_up_tokens: int = 32
    num_repetitions: int = 5
    first_token_prompts: tuple[int, ...] = (512, 2048)
    num_requests: int = 256
    throughput_prompts: tuple[int, int] = (32, 512)
    throughput_outputs: tuple[int, int] = (16, 256)


FULL = Sizes()
REHEARSAL = Sizes(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_decode_burst=2,
    max_model_len=64,
    block_size=16,
    num_cache_tokens=512,
    decode_batches=(4,),
    decode_prompt=12,
    num_decode_tokens=24,
    num_warm_up_tokens=4,
    num_repetitions=2,
    first_token_prompts=(8,),
    num_requests=6,
    throughput_prompts=(4, 16),
    throughput_outputs=(2, 8),
)


def write_config(folder: Path, model: str, *, is_rehearsal: bool) -> dict[str, Any]:
    """Writes the config.json of a model, tiny for a rehearsal; returns its fields."""
    config = MODEL_CONFIGS[model] | (_TINY if is_rehearsal else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """Totals of a run after one step of the engine."""

    end_s: float
    num_tokens: int
    num_started: int  # requests with a token
    num_finished: int


def steady_decode(steps: list[EngineStep], num_reqs: int) -> dict[str, list[float]]:
    """Computes the figures of the steps in which all requests decode.

    Raises:
        ValueError: There are fewer than 3 such steps.
    """
    steady = [step for step in steps if step.num_started == num_reqs and not step.num_finished]
    if len(steady) < 3:
        raise ValueError(f"got {len(steady)} steps of steady decode, wanted at least 3.")
    # Omit the first quarter, in which bursts are still shorter.
    first, last = steady[len(steady) // 4], steady[-1]
    num_steps = (last.num_tokens - first.num_tokens) / num_reqs
    wall_s = last.end_s - first.end_s
    return {
        "step_ms": [1e3 * wall_s / num_steps],
        "tokens_per_s": [num_reqs * num_steps / wall_s],
    }


class Subject(abc.ABC):
    """An engine with one model on the device. The units of a process share it.

    Derived classes also have a method `throughput(seed)`.

    Args:
        is_rehearsal: Whether the model and the workloads are tiny.
    """

    def __init__(self, *, is_rehearsal: bool) -> None:
        self.sizes = REHEARSAL if is_rehearsal else FULL
        self.vocab_size = 0

    @abc.abstractmethod
    def run(self, workload: Workload) -> list[EngineStep]:
        """Runs requests that all arrive at once, and returns the totals after each step."""

    def decode(self, num_reqs: int, seed: int) -> Measured:
        """Measures steps in which `num_reqs` requests decode together."""
        sizes = self.sizes
        workload = self._workload(
            seed, num_reqs, (sizes.decode_prompt,) * 2, (sizes.num_decode_tokens,) * 2
        )
        self.run(workload.first(num_reqs, sizes.num_warm_up_tokens))
        return Measured(figures=steady_decode(self.run(workload), num_reqs))

    def first_token(self, prompt_len: int, seed: int) -> Measured:
        """Measures the time to the first token of one prompt on an idle device.

        The first repetition compiles, and is not counted.
        """
        seconds = []
        for repetition in range(self.sizes.num_repetitions + 1):
            prompt = self._workload(seed + repetition, 1, (prompt_len,) * 2, (1, 1))
            seconds.append(self.run(prompt)[-1].end_s)
        return Measured(figures={"ttft_ms": [1e3 * s for s in seconds[1:]]})

    def throughput_workload(self, seed: int) -> Workload:
        """Requests of many lengths, the same for every engine."""
        sizes = self.sizes
        return self._workload(
            seed, sizes.num_requests, sizes.throughput_prompts, sizes.throughput_outputs
        )

    def _workload(
        self, seed: int, num_requests: int, prompts: tuple[int, int], outputs: tuple[int, int]
    ) -> Workload:
        """Requests with random tokens; both ranges of lengths include their ends."""
        rng = np.random.RandomState(seed)
        requests = uniform_requests(
            rng, self.vocab_size, num_requests=num_requests, prompts=prompts, outputs=outputs
        )
        return Workload(name="random", requests=requests)
