"""Checkpoints, requests and limits of engines whose layers several devices share."""

from typing import Any

from paxkv.config.sampling_params import SamplingParams
from tests.end_to_end.engine_harness import EngineSettings

# Few blocks, so that requests are preempted and prefixes are hit.
SETTINGS = EngineSettings(num_blocks=30, arrival_gap=2, max_decode_burst=4)
LIMITS: dict[str, Any] = {"max_num_batched_tokens": 64, "has_few_sizes": True}
PROMPTS = [[7, 8, 9, 7], list(range(5, 40)), list(range(5, 30)), [3] * 18]
# States of the first prompt are saved after 32 tokens.
STATE_PROMPTS = [list(range(5, 40)), list(range(5, 42)), [*range(5, 37), 9, 9], [3] * 18]
DRAWS = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 9, "ignore_eos": True}
PARAMS = [
    SamplingParams(seed=1, presence_penalty=0.7, frequency_penalty=0.3, **DRAWS),
    SamplingParams(seed=2, repetition_penalty=1.3, logit_bias={5: 2.0}, **DRAWS),
    SamplingParams(seed=3, min_p=0.01, top_k=40, **DRAWS),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
]
# Weights are random. They are large enough that logits are as those of a trained model.
MOE_CONFIG = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE_CONFIG
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    # No number of devices divides the vocabulary; embedding and head are tied.
    "odd_vocabulary": MOE_CONFIG
    | {"architectures": ["LlamaForCausalLM"], "vocab_size": 163, "tie_word_embeddings": True},
    "few_kv_heads": MOE_CONFIG | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2},
    # Sinks, biases of experts, and every second layer with a window.
    "gpt_oss": MOE_CONFIG
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_experts": 4,
        "num_local_experts": 4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": 32,
    },
    # Latents, which all devices have, and a shared expert.
    "deepseek_v3": MOE_CONFIG
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    # States, of whose heads each device has its own, beside attention and experts.
    "qwen3_next": MOE_CONFIG
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "full_attention_interval": 2,
        "norm_topk_prob": True,
    },
    # Several residual streams, an index of blocks, and two states in one layer.
    "qwen4_exp": MOE_CONFIG
    | {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 8,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 2,
    },
    # Convolutions of queries and keys, and experts that a token may skip.
    "zaya": MOE_CONFIG
    | {
        "architectures": ["ZayaForCausalLM"],
        "num_experts_per_tok": 1,
        "router_hidden_size": 32,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 16,
    },
    # Biases of distances in each head, with and without a window, and convolutions.
    "inkling": MOE_CONFIG
    | {
        "architectures": ["InklingForCausalLM"],
        "swa_head_dim": 16,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "sliding_window_size": 16,
        "d_rel": 4,
        "rel_extent": 20,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
        "route_scale": 2.0,
        "logits_mup_width_multiplier": 2.0,
        "log_scaling_n_floor": 8,
    },
    "lfm2": MOE_CONFIG
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
    },
    # States beside latents. Each device has the whole inner vectors of which decays are computed.
    "kimi_linear": MOE_CONFIG
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_key_value_heads": 8,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    # States with slopes that depend on the layer.
    "minimax": MOE_CONFIG
    | {
        "architectures": ["MiniMaxForCausalLM"],
        "model_type": "minimax",
        "layer_types": ["linear_attention", "full_attention"],
    },
    # States beside keys and values, and a norm over all heads.
    "falcon_h1": MOE_CONFIG
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": 160,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_heads": 12,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "expand": 2,
        "initializer_range": 0.2,
        "eos_token_id": 2,
    },
}
