"""Runs engines on simulated devices; the first argument of the command is a key of `CASES`.

The number of CPU devices is settled when JAX starts, so tests run this file in its own process.
"""

import sys

from tests.end_to_end.split_answers import (
    check_drafter,
    check_generator,
    check_golden,
    check_llm,
    check_same_as_alone,
)
from tests.end_to_end.split_collectives import check_state_collectives
from tests.end_to_end.split_context import check_context_ranks, check_merged_attention
from tests.end_to_end.split_drafters import check_state_drafter
from tests.end_to_end.split_experts import check_own_experts
from tests.end_to_end.split_states import LAYERS, MORE_LAYERS, check_own_heads
from tests.end_to_end.split_weights import check_expert_stacks, check_kept_integers, check_weights
from tests.engine_compilations import quick_engine_compilations

OWN_EXPERTS = {"enable_expert_parallel": True}
CASES = {
    "quick": lambda: (
        check_weights(4),
        check_kept_integers("awq", 2),
        check_expert_stacks(4, **OWN_EXPERTS),
        check_own_experts(4),
        check_own_heads(LAYERS),
        check_merged_attention(4, 2, "float32", 1e-5),
    ),
    "llama": lambda: (
        check_golden("llama", 2),
        check_golden("llama", 4),
        check_same_as_alone("llama", 4),
        check_same_as_alone("odd_vocabulary", 4),
    ),
    "qwen3": lambda: (check_golden("qwen3", 2), check_golden("qwen3", 4), check_generator(4)),
    "windows": lambda: (
        check_golden("gemma3_shallow", 4),
        check_golden("qwen2_window", 4),
        check_golden("gemma2", 2),
    ),
    "sinks": lambda: (check_same_as_alone("gpt_oss", 2), check_same_as_alone("gpt_oss", 4)),
    "experts": lambda: (
        check_expert_stacks(2),
        check_same_as_alone("qwen3_moe", 2),
        check_same_as_alone("qwen3_moe", 4),
    ),
    "expert_parallel": lambda: (
        check_same_as_alone("qwen3_moe", 2, **OWN_EXPERTS),
        check_same_as_alone("gpt_oss", 4, **OWN_EXPERTS),
        check_same_as_alone(
            "qwen3_moe", 4, quantization="int8", quantization_group_size=32, **OWN_EXPERTS
        ),
        check_same_as_alone("zaya", 4, **OWN_EXPERTS),
    ),
    "llm": check_llm,
    "quantized": lambda: (
        check_same_as_alone("llama", 2, quantization="int4", quantization_group_size=32),
        check_same_as_alone("llama", 2, product_dtype="int8"),
        check_same_as_alone("qwen3_moe", 2, quantization="int8", quantization_group_size=32),
    ),
    "drafters": lambda: (
        check_drafter("eagle3", 2),
        check_drafter("draft_model", 2),
        check_drafter("mtp", 2),
        check_drafter("mtp", 4),
        check_state_drafter(),
    ),
    "latents": lambda: check_same_as_alone("deepseek_v3", 4),
    "context_parallel": lambda: (
        check_merged_attention(4, 2, "bfloat16", 2e-2),
        check_context_ranks("deepseek_v3", 2, 2, 2),
        check_context_ranks("deepseek_v3", 4, 4, 4),
        check_context_ranks("few_kv_heads", 4, 2, 4),
    ),
    "states": lambda: (
        check_same_as_alone("qwen3_next", 2),
        check_same_as_alone("qwen3_next", 4),
        check_same_as_alone("qwen4_exp", 4),
        check_same_as_alone("inkling", 2),
        check_same_as_alone("mamba2", 2),
        check_same_as_alone("mamba2", 4),
        check_same_as_alone("falcon_h1", 4),
        check_same_as_alone("kimi_linear", 4),
        check_same_as_alone("minimax", 4),
        check_own_heads(MORE_LAYERS),
        check_state_collectives(4),
        check_same_as_alone("lfm2", 2),
    ),
}


if __name__ == "__main__":
    with quick_engine_compilations():
        CASES[sys.argv[1]]()
    print("same")
