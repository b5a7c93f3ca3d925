"""config.json of families with states: fields left out, fields set, and fields that are refused."""

import pytest

from models.config.state_layers import read_has_state
from models.errors import ModelConfigError
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

SIZES = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
# Qwen4-Exp has an index only if config.json has these fields.
QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
# Few embeddings of n-grams.
NGRAMS = {"ngram_vocab_size_base": 50, "heads_per_ngram": 4, "ple_embed_dim": 24, "eos_token_id": 2}
# Architecture -> its configuration class in transformers, and fields that differ from `SIZES`.
FAMILIES = {
    "BailingHybridForCausalLM": ("BailingHybridConfig", {"num_key_value_heads": 16}),
    "FalconMambaForCausalLM": ("FalconMambaConfig", {"intermediate_size": None}),
    "FalconH1ForCausalLM": ("FalconH1Config", {"mamba_d_ssm": 128, "mamba_n_heads": 8}),
    "GraniteMoeHybridForCausalLM": ("GraniteMoeHybridConfig", {"mamba_n_heads": 8}),
    "JambaForCausalLM": ("JambaConfig", {}),
    "KimiLinearForCausalLM": ("KimiLinearConfig", {"num_key_value_heads": 16}),
    "LaraMiniForCausalLM": ("LaraMiniConfig", {"intermediate_size": None}),
    "Lfm2ForCausalLM": ("Lfm2Config", {"layer_types": ["conv"] * 8}),
    "Lfm2MoeForCausalLM": ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"] * 4}),
    "Lfm3ForCausalLM": ("Lfm3Config", {}),
    "MambaForCausalLM": ("MambaConfig", {"intermediate_size": None}),
    "MiniMaxForCausalLM": ("MiniMaxConfig", {}),
    "NemotronHForCausalLM": ("NemotronHConfig", {"num_hidden_layers": 4}),
    "OlmoHybridForCausalLM": ("OlmoHybridConfig", {}),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", {}),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", {}),
    "Qwen4ExpForCausalLM": ("Qwen4ExpTextConfig", {"intermediate_size": None, **QSA}),
    "ZambaForCausalLM": ("ZambaConfig", {}),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {}),
    "ZayaForCausalLM": ("ZayaConfig", {"intermediate_size": None}),
    "Zamba2ForCausalLM": ("Zamba2Config", {"num_hidden_layers": 54, "hidden_size": 128}),
}
HYBRID = ["linear_attention", "full_attention"] * 4
# Fields of the hub and of transformers 5, in values that are no defaults.
OTHER_FIELDS = [
    ("BailingHybridForCausalLM", {"layer_types": HYBRID, "mlp_layer_types": ["sparse"] * 8}),
    ("BailingHybridForCausalLM", {"layer_group_size": 3, "first_k_dense_replace": 1}),
    ("BailingHybridForCausalLM", {"head_dim": 32, "short_conv_kernel_size": 3}),
    ("BailingHybridForCausalLM", {"kda_safe_gate": False, "q_lora_rank": 24}),
    ("BailingHybridForCausalLM", {"kda_lower_bound": -2.5, "num_nextn_predict_layers": 0}),
    ("BailingHybridForCausalLM", {"num_experts_per_token": 2, "num_expert_group": 4}),
    ("BailingHybridForCausalLM", {"rope_theta": 1e4, "moe_renormalize": False}),
    ("FalconH1ForCausalLM", {"mamba_d_ssm": 64, "mamba_d_head": 8, "mamba_n_groups": 2}),
    ("FalconH1ForCausalLM", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    (
        "FalconH1ForCausalLM",
        {"ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.5], "ssm_in_multiplier": 0.5},
    ),
    ("FalconH1ForCausalLM", {"mlp_multipliers": [0.5, 2.0], "key_multiplier": 0.25}),
    ("FalconH1ForCausalLM", {"projectors_bias": True, "mlp_bias": True, "attention_bias": True}),
    ("FalconH1ForCausalLM", {"embedding_multiplier": 5.6, "lm_head_multiplier": 0.03}),
    ("FalconMambaForCausalLM", {"mixer_rms_eps": 1e-5, "tie_word_embeddings": False}),
    # Falcon-Mamba-7B has a wrong `expand`.
    ("FalconMambaForCausalLM", {"expand": 16, "intermediate_size": 144}),
    ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"] * 4}),
    ("GraniteMoeHybridForCausalLM", {"layer_types": HYBRID, "position_embedding_type": "rope"}),
    ("GraniteMoeHybridForCausalLM", {"num_local_experts": 0, "shared_intermediate_size": 48}),
    ("GraniteMoeHybridForCausalLM", {"mamba_d_state": 8, "mamba_n_groups": 2}),
    ("JambaForCausalLM", {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 3}),
    ("JambaForCausalLM", {"expert_layer_period": 3, "expert_layer_offset": 0, "num_experts": 4}),
    ("JambaForCausalLM", {"num_experts": 1, "mamba_d_state": 8, "mamba_proj_bias": True}),
    ("JambaForCausalLM", {"mamba_d_conv": 3, "mamba_expand": 1, "mamba_conv_bias": False}),
    ("KimiLinearForCausalLM", {"layer_types": HYBRID, "mlp_layer_types": ["sparse"] * 8}),
    (
        "KimiLinearForCausalLM",
        {
            "linear_attn_config": {
                "full_attn_layers": [4, 8],
                "kda_layers": [1, 2, 3, 5, 6, 7],
                "head_dim": 64,
                "num_heads": 8,
                "short_conv_kernel_size": 3,
            },
            "first_k_dense_replace": 2,
        },
    ),
    ("KimiLinearForCausalLM", {"linear_head_dim": 32, "linear_num_heads": 4}),
    ("KimiLinearForCausalLM", {"q_lora_rank": 24, "qk_rope_head_dim": 8, "kv_lora_rank": 32}),
    ("KimiLinearForCausalLM", {"num_experts_per_token": 2, "num_experts": 8, "topk_group": 1}),
    ("KimiLinearForCausalLM", {"moe_renormalize": False, "routed_scaling_factor": 1.5}),
    ("LaraMiniForCausalLM", {"layer_types": ["linear_attention", "sliding_attention"] * 4}),
    ("LaraMiniForCausalLM", {"linear_num_key_heads": 4, "linear_value_head_dim": 24}),
    ("LaraMiniForCausalLM", {"sliding_window": 64, "rope_theta": 1e4, "head_dim": 32}),
    ("LaraMiniForCausalLM", {"norm_topk_prob": False, "shared_expert_intermediate_size": 48}),
    ("Lfm2ForCausalLM", {"layer_types": None, "full_attn_idxs": [1, 3]}),
    ("Lfm2ForCausalLM", {"block_ff_dim": 128, "block_multiple_of": 32, "tie_embedding": False}),
    ("Lfm2ForCausalLM", {"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 8}),
    ("Lfm2ForCausalLM", {"block_auto_adjust_ff_dim": False, "conv_bias": True, "norm_eps": 1e-6}),
    ("Lfm2ForCausalLM", {"conv_L_cache": 4, "rope_theta": 5e5}),
    ("Lfm2MoeForCausalLM", {"num_dense_layers": 0, "norm_topk_prob": False, "num_experts": 8}),
    ("Lfm2MoeForCausalLM", {"routed_scaling_factor": 2.5, "conv_L_cache": 4}),
    ("Lfm3ForCausalLM", {"layer_types": ["conv", "sliding_attention"] * 4, "sliding_window": 64}),
    ("Lfm3ForCausalLM", {"use_sandwich_norm": False, "use_attention_gate": False}),
    ("Lfm3ForCausalLM", {"conv_L_cache": 3, "conv_bias": True, "attention_bias": True}),
    ("Lfm3ForCausalLM", {"head_dim": 16, "norm_eps": 1e-6, "tie_word_embeddings": False}),
    ("MambaForCausalLM", {"expand": 3, "state_size": 8, "time_step_rank": 5}),
    ("MambaForCausalLM", {"conv_kernel": 3, "use_bias": True, "use_conv_bias": False}),
    ("MambaForCausalLM", {"layer_norm_epsilon": 1e-6, "tie_word_embeddings": False}),
    ("MiniMaxForCausalLM", {"layer_types": ["linear_attention"] * 7 + ["full_attention"]}),
    ("MiniMaxForCausalLM", {"linear_attn_alpha_factor": 3.5, "full_attn_beta_factor": 2}),
    ("MiniMaxForCausalLM", {"mlp_alpha_factor": 3.5, "num_local_experts": 4, "head_dim": 8}),
    ("MiniMaxForCausalLM", {"sliding_window": 64, "rope_theta": 1e4}),
    ("MambaForCausalLM", {"residual_in_fp32": False}),
    ("NemotronHForCausalLM", {"layers_block_type": ["moe", "mamba", "mlp", "attention"]}),
    ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-M*EM", "mamba_n_groups": 4}),
    ("NemotronHForCausalLM", {"moe_latent_size": 32, "mlp_bias": True, "use_bias": True}),
    ("NemotronHForCausalLM", {"n_group": 2, "routed_scaling_factor": 2.5, "head_dim": 8}),
    ("NemotronHForCausalLM", {"time_step_limit": [0.01, 0.5], "layer_norm_epsilon": 1e-6}),
    ("OlmoHybridForCausalLM", {"layer_types": HYBRID, "attention_bias": True}),
    ("OlmoHybridForCausalLM", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    ("OlmoHybridForCausalLM", {"linear_key_head_dim": 8, "linear_allow_neg_eigval": False}),
    ("OlmoHybridForCausalLM", {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 3}),
    ("OlmoHybridForCausalLM", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    ("Qwen3_5ForCausalLM", {"layer_types": HYBRID, "head_dim": 32, "rms_norm_eps": 1e-5}),
    ("Qwen3_5ForCausalLM", {"full_attention_interval": 2, "linear_num_key_heads": 4}),
    ("Qwen3_5ForCausalLM", {"linear_key_head_dim": 8, "linear_value_head_dim": 24}),
    ("Qwen3_5ForCausalLM", {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5}}),
    ("Qwen3_5MoeForCausalLM", {"layer_types": HYBRID, "num_experts": 8, "num_experts_per_tok": 2}),
    ("Qwen3_5MoeForCausalLM", {"linear_conv_kernel_dim": 3, "moe_intermediate_size": 24}),
    ("Qwen3_5MoeForCausalLM", {"shared_expert_intermediate_size": 48, "tie_word_embeddings": True}),
    ("Qwen4ExpForCausalLM", {"layer_types": HYBRID, "num_experts": 16, "hc_count": 2}),
    ("Qwen4ExpForCausalLM", {"full_attention_interval": 2, "hc_lowrank": 24}),
    ("Qwen4ExpForCausalLM", {"indexer_n_heads": 2, "indexer_budget": 48}),
    ("Qwen4ExpForCausalLM", {"indexer_compress_ratio": 8, "indexer_head_dim": 512}),
    ("Qwen4ExpForCausalLM", {"output_gate_type": "sigmoid", "norm_topk_prob": False}),
    ("Qwen4ExpForCausalLM", {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}),
    ("Qwen4ExpForCausalLM", {"head_dim": 32, "num_experts_per_tok": 2, "linear_key_head_dim": 8}),
    ("Qwen4ExpForCausalLM", {"ple_layer_ids": [6, 1, 6], **NGRAMS}),
    ("Qwen4ExpForCausalLM", {"ple_layer_ids": [1], **NGRAMS, "ngram_size": 4, "seed": 5}),
    ("Qwen4ExpForCausalLM", {"ple_layer_ids": [2], **NGRAMS, "ple_conv_kernel_size": 3}),
    ("Qwen4ExpForCausalLM", {"ple_layer_ids": [2], **NGRAMS, "split_ngram_parts": 3}),
    ("ZambaForCausalLM", {"layers_block_type": ["hybrid", "mamba"] * 4, "n_mamba_heads": 4}),
    ("ZambaForCausalLM", {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 7}),
    ("ZambaForCausalLM", {"attention_head_dim": 16, "mamba_d_state": 8, "hidden_act": "silu"}),
    ("ZambaForCausalLM", {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}),
    ("RecurrentGemmaForCausalLM", {"block_types": ["attention", "recurrent"], "lru_width": 96}),
    ("RecurrentGemmaForCausalLM", {"attention_window_size": 64, "conv1d_width": 3}),
    ("RecurrentGemmaForCausalLM", {"partial_rotary_factor": 1.0, "logits_soft_cap": 20.0}),
    ("RecurrentGemmaForCausalLM", {"hidden_activation": "silu", "attention_bias": True}),
    ("ZayaForCausalLM", {"cca_time0": 3, "cca_time1": 4, "attention_bias": True, "head_dim": 32}),
    ("ZayaForCausalLM", {"layer_types": ["hybrid_sliding"] * 8, "sliding_window": 64}),
    ("ZayaForCausalLM", {"router_hidden_size": 32, "num_experts": 8, "hidden_act": "gelu"}),
    (
        "ZayaForCausalLM",
        {"rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    ("Zamba2ForCausalLM", {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]}),
    ("Zamba2ForCausalLM", {"n_mamba_heads": 16, "mamba_ngroups": 2, "mamba_d_state": 8}),
    ("Zamba2ForCausalLM", {"num_mem_blocks": 2, "adapter_rank": 4}),
    ("Zamba2ForCausalLM", {"use_mem_rope": True, "rope_theta": 5e5, "mamba_d_conv": 3}),
    ("Zamba2ForCausalLM", {"use_shared_attention_adapter": True, "intermediate_size": 80}),
]


def make_hf_config(architecture: str, **fields: object) -> dict[str, object]:
    """A config.json of this architecture; a field given as None is left out."""
    config = {"architectures": [architecture], **SIZES, **FAMILIES[architecture][1], **fields}
    return {name: value for name, value in config.items() if value is not None}


def as_read(hf_config: dict[str, object]):
    """The config, without the name of the type, which only transformers writes."""
    model_type = FAMILIES[hf_config["architectures"][0]][0]
    return read_config(hf_config | {"model_type": model_type})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fields_left_out_have_transformers_defaults(architecture):
    hf_config = make_hf_config(architecture)
    theirs = as_transformers_reads_it(hf_config, FAMILIES[architecture][0])
    assert as_read(hf_config) == as_read(theirs)
    formats = as_read(hf_config).spec("float32").own_formats.values()
    assert any(cache.kind == "state" for cache in formats)


@pytest.mark.parametrize(("architecture", "fields"), OTHER_FIELDS)
def test_other_fields_mean_what_they_mean_in_transformers(architecture, fields):
    hf_config = make_hf_config(architecture) | fields
    theirs = as_transformers_reads_it(hf_config, FAMILIES[architecture][0])
    assert as_read(hf_config) == as_read(theirs)
    assert as_read(hf_config) != as_read(make_hf_config(architecture))


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("NemotronHForCausalLM", "mamba_ssm_cache_dtype"),
        ("Qwen3_5ForCausalLM", "mamba_ssm_dtype"),
    ],
)
def test_checkpoint_may_say_in_which_dtype_states_are_kept(architecture, field):
    def dtypes(**fields):
        formats = as_read(make_hf_config(architecture, **fields)).spec("float32").own_formats
        return {cache.state_dtype for cache in formats.values() if cache.kind == "state"}

    assert dtypes() == {"float32"} and dtypes(**{field: "bfloat16"}) == {"bfloat16"}
    with pytest.raises(ModelConfigError, match=f"{field} is 'int8'; expected float32, bfloat16"):
        dtypes(**{field: "int8"})


@pytest.mark.parametrize("written", ["linear_attention", ["full_attention"], ["other"] * 2])
def test_types_of_layers_that_do_not_fit_are_named(written):
    with pytest.raises(ModelConfigError, match="layer_types is .*; expected a list of 2 names"):
        read_has_state({"layer_types": written}, [True, False], "linear_attention")
