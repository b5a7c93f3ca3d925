"""The models' shapes and all sizes of the work, in full and in small."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import Workload, WorkloadRequest

_BASE = {"attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}
_QWEN3 = {
    **_BASE,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
_LLAMA = {
    **_BASE,
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
QWEN3_0_6B, LLAMA_3_1_8B = "qwen3-0.6b", "llama-3.1-8b"
# Fields of config.json, as published with the weights.
MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    QWEN3_0_6B: {
        **_QWEN3,
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    LLAMA_3_1_8B: {
        **_LLAMA,
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work there is.

    Args:
        block_size: Of the KV cache; None is the device's default.
        num_cache_tokens: Token positions of the KV cache.
        num_bursts, num_single_steps: Of a phase of the decode measurement.
        num_repetitions: Of what takes little time.
        throughput_prompts, throughput_outputs: Least and most tokens, uniform between.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_decode_burst: int
    max_model_len: int
    block_size: int | None
    num_cache_tokens: int
    decode_batches: tuple[int, ...]
    decode_prompt: int
    num_bursts: int
    num_single_steps: int
    num_repetitions: int
    ttft_prompts: tuple[int, ...]
    num_requests: int
    throughput_prompts: tuple[int, int]
    throughput_outputs: tuple[int, int]
    num_prefix_requests: int
    prefix_lengths: tuple[int, int, int]  # shared, own, output
    num_peer_steps: int
    num_copied_bytes: int

    @property
    def num_decode_steps(self) -> int:
        """Steps that a decode measurement takes of every request, the warm-up included."""
        num_burst_phases = 4 + 2  # timed; to warm up, and to time the host
        num_single_phases = 3
        return (
            num_burst_phases * self.num_bursts * self.max_decode_burst
            + num_single_phases * self.num_single_steps
        )


FULL = Sizes(
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_decode_burst=8,
    max_model_len=2560,
    block_size=None,
    num_cache_tokens=2**18,
    decode_batches=(64, 256, 1),
    decode_prompt=512,
    num_bursts=8,
    num_single_steps=16,
    num_repetitions=5,
    ttft_prompts=(512, 2048),
    num_requests=256,
    throughput_prompts=(32, 512),
    throughput_outputs=(16, 256),
    num_prefix_requests=64,
    prefix_lengths=(512, 32, 16),
    num_peer_steps=32,
    num_copied_bytes=2**32,
)
REHEARSAL = Sizes(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_decode_burst=2,
    max_model_len=64,
    block_size=16,
    num_cache_tokens=512,
    decode_batches=(4, 1),
    decode_prompt=20,
    num_bursts=2,
    num_single_steps=2,
    num_repetitions=2,
    ttft_prompts=(8, 16),
    num_requests=6,
    throughput_prompts=(4, 16),
    throughput_outputs=(2, 8),
    num_prefix_requests=4,
    prefix_lengths=(32, 4, 4),
    num_peer_steps=2,
    num_copied_bytes=2**22,
)


def sizes_of(*, is_rehearsal: bool) -> Sizes:
    return REHEARSAL if is_rehearsal else FULL


def write_config(folder: Path, model: str, *, is_rehearsal: bool) -> dict[str, Any]:
    """Writes the config.json of a model, in small for a rehearsal; returns its fields."""
    small = _TINY if is_rehearsal else {}
    config = {**MODEL_CONFIGS[model], **small}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config


def equal_workload(
    num_requests: int, prompt_len: int, num_output_tokens: int, *, vocab_size: int, seed: int
) -> Workload:
    """Requests of one shape, of random tokens."""
    rng = np.random.RandomState(seed)
    prompts = rng.randint(0, vocab_size, size=(num_requests, prompt_len)).tolist()
    return Workload(
        name="equal",
        requests=[
            WorkloadRequest(prompt_token_ids=prompt, num_output_tokens=num_output_tokens)
            for prompt in prompts
        ],
    )


def throughput_workload(sizes: Sizes, *, vocab_size: int, seed: int) -> Workload:
    """Requests of all lengths, the same for every engine."""
    rng = np.random.RandomState(seed)
    (least, most), (least_new, most_new) = sizes.throughput_prompts, sizes.throughput_outputs
    return Workload(
        name="throughput",
        requests=[
            WorkloadRequest(
                prompt_token_ids=rng.randint(
                    0, vocab_size, size=rng.randint(least, most + 1)
                ).tolist(),
                num_output_tokens=int(rng.randint(least_new, most_new + 1)),
            )
            for _ in range(sizes.num_requests)
        ],
    )


def prefix_workload(sizes: Sizes, *, vocab_size: int, seed: int) -> Workload:
    """Requests that share the beginning of their prompts."""
    shared_len, own_len, num_output_tokens = sizes.prefix_lengths
    rng = np.random.RandomState(seed)
    shared = rng.randint(0, vocab_size, size=shared_len).tolist()
    return Workload(
        name="prefix",
        requests=[
            WorkloadRequest(
                prompt_token_ids=shared + rng.randint(0, vocab_size, size=own_len).tolist(),
                num_output_tokens=num_output_tokens,
            )
            for _ in range(sizes.num_prefix_requests)
        ],
    )
