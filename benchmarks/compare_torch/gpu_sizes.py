"""Shapes of the models, and amounts of work, of the comparison on a GPU."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import Workload, WorkloadRequest

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
    "qwen3-0.6b": _BASE | _QWEN3,
    "llama-3.1-8b": _BASE | _LLAMA,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Amounts of work.

    Args:
        block_size: Of the KV cache; None is the device's default.
        decode_batches: Requests that decode together.
        decode_prompt, num_decode_tokens: Tokens of each of them.
        throughput_prompts, throughput_outputs: Least and most tokens, uniform between.
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
    num_peer_steps: int = 32
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
    num_peer_steps=2,
    num_repetitions=2,
    first_token_prompts=(8,),
    num_requests=6,
    throughput_prompts=(4, 16),
    throughput_outputs=(2, 8),
)


def sizes_of(*, is_rehearsal: bool) -> Sizes:
    return REHEARSAL if is_rehearsal else FULL


def write_config(folder: Path, model: str, *, is_rehearsal: bool) -> dict[str, Any]:
    """Writes the config.json of a model, tiny for a rehearsal; returns its fields."""
    config = MODEL_CONFIGS[model] | (_TINY if is_rehearsal else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config


def equal_workload(
    num_requests: int, prompt_len: int, num_output_tokens: int, *, vocab_size: int, seed: int
) -> Workload:
    """Requests of one shape, with random tokens."""
    rng = np.random.RandomState(seed)
    prompts = rng.randint(0, vocab_size, size=(num_requests, prompt_len)).tolist()
    requests = [
        WorkloadRequest(prompt_token_ids=prompt, num_output_tokens=num_output_tokens)
        for prompt in prompts
    ]
    return Workload(name="equal", requests=requests)


def throughput_workload(sizes: Sizes, *, vocab_size: int, seed: int) -> Workload:
    """Requests of all lengths, the same for every engine."""
    rng = np.random.RandomState(seed)
    (least, most), (least_new, most_new) = sizes.throughput_prompts, sizes.throughput_outputs
    requests = [
        WorkloadRequest(
            prompt_token_ids=rng.randint(0, vocab_size, size=rng.randint(least, most + 1)).tolist(),
            num_output_tokens=int(rng.randint(least_new, most_new + 1)),
        )
        for _ in range(sizes.num_requests)
    ]
    return Workload(name="throughput", requests=requests)
