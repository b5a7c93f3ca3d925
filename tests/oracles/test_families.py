"""Which reference configurations load, that others are refused, and that no field is ignored."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models import read_config
from models.config.model_config import ModelConfig
from models.errors import ModelError, UnsupportedModelError
from models.registry import family_class
from tests.oracles import families
from tests.oracles.more_families import MORE

DECODERS = families.FAMILIES | families.EXTRA | families.NEWEST
# docs/guide/models.md has a row for the architecture of each: `tests/aot/models_table.py`.
LOADED = [
    "llama",
    "qwen3",
    "gemma3",
    "mistral-window",
    "olmo2",
    "phi3",
    "glm4",
    "qwen3-moe",
    "mixtral",
    "gpt-oss",
    "llama4",
    "deepseek-v3",
    "deepseek-v2",
    "jamba",
    "bamba",
    "granite-hybrid",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "qwen4-exp",
    "qwen4-exp-ple",
    "olmo-hybrid",
    "kimi-linear",
    "bailing-hybrid",
    "minimax-01",
    "nemotron-h",
    "nemotron-h-latent",
    "falcon-h1",
    "zamba2",
    "mamba",
    "falcon-mamba",
    "mamba2",
    "lfm2",
    "lfm2-moe",
    "lfm3",
    "inkling",
    "zaya",
    "recurrent-gemma",
    "glm4-moe-lite",
    "mistral4",
    "longcat-flash",
    "minicpm3",
    "youtu",
    "axk1",
    "deepseek-v3.2",
    "glm5-dsa",
    "axk2",
    "qwen2",
    "gemma2",
    "gemma4-dense",
    "gemma4-ple",
    "gemma4-moe",
    "gemma3n",
    "ministral3",
    "phi3-longrope",
    "llama3-rope",
    "cohere",
    "cohere2",
    "granite",
    "granite-swa",
    "exaone4",
    "olmo3",
    "seed-oss",
    "smollm3",
    "hunyuan-dense",
    "ernie4.5",
    "apertus",
    "arcee",
    "nemotron",
    "starcoder2",
    "jais2",
    "cwm",
    "hyperclovax",
    "qwen2-moe",
    "glm4-moe",
    "minimax-m2",
    "mimo-v2-flash",
    "hy-v3",
    "laguna",
    "ernie4.5-moe",
    "hunyuan-moe",
    "exaone-moe",
    "cohere2-moe",
    "granite-moe",
    "granite-moe-swa",
    "olmoe",
    "phimoe",
    "dots1",
    "afmoe",
    "solar-open",
    "mellum2",
    "kolibri1",
    "beam",
    "flint",
    "glm",
    "falcon",
    "falcon-rw",
    "gpt2",
    "gpt-neox",
    "gptj",
    "opt",
    "bloom",
    "mpt",
    "phi",
    "stablelm",
    "olmo",
    "flex-olmo",
    "gpt-bigcode",
    "dbrx",
    "helium",
    "vaultgemma",
    "gemma",
    "nanochat",
    "jetmoe",
    "zamba",
    "diffllama",
    "doge",
    "stablelm-2",
    "ministral3-far",
    "olmo-clipped",
    "phi-normed",
    "hyperclovax-prenorm",
    "mimo-v2-flash-dense",
    "laguna-per-element",
    "inkling-far",
    "granite-moe-tied",
    "granite-moe-shared",
    "bloom-6-heads",
    "doge-window",
    "mistral4-far",
    "glm5-dsa-all",
    "zamba2-blocks",
    "qwen4-exp-all",
    "qwen4-exp-odd",
    "falcon-h1-normed",
    "zaya-skips",
    "apertus1.5",
    "dory",
    "exaone3",
    "lara-mini",
    "sarvam-mla",
    "sarvam-moe",
    "cohere-compass",
    "gemma4-unified-text",
    "iquestcoder",
    "internlm3",
]


def architecture_of(config) -> str:
    """The name of the class of the model, which need not be imported for it."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return name or families.model_class(config).__name__


def test_decoder_configurations_load_or_are_refused_with_the_architecture_named():
    assert len(DECODERS) == 136 + len(MORE)
    loaded = []
    for name, make_config in DECODERS.items():
        config = make_config()
        config.architectures = [architecture_of(config)]
        hf_config = json.loads(config.to_json_string(use_diff=False))
        try:
            read_config(hf_config)
        except UnsupportedModelError as error:
            assert config.architectures[0] in str(error), name
        else:
            loaded.append(name)
    assert loaded == LOADED


# Fields that change no answer: for training, for other outputs, or for the tokenizer's use.
_WITHOUT_EFFECT = {
    *("_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "problem_type"),
    *("return_dict", "transformers_version", "use_cache", "pretraining_tp"),
    *("pad_token_id", "eod_token_id", "sep_token_id"),
    *("attention_dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout", "resid_pdrop"),
    *("attn_pdrop", "classifier_dropout", "dropout", "hidden_dropout", "layerdrop", "is_decoder"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "reorder_and_upcast_attn", "attention_softmax_in_fp32"),
    *("scale_attention_softmax_in_fp32", "slow_but_exact", "emb_pdrop", "embedding_fraction"),
    *("init_device", "lambda_std_dev", "embedding_initializer_range"),
    *("chunk_size", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"),
    *("time_step_init_scheme", "time_step_scale", "use_associative_scan", "use_mambapy"),
    *("rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min"),
    *("final_w_init_variance_scale", "w_init_variance_scale"),
    # How states are stored, and how other engines compute states and experts. And drafts.
    *("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "use_mamba_kernels"),
    *("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor"),
    *("linear_dt_max", "linear_dt_min"),
    *("mtp_loss_scaling_factor", "mtp_layers_block_type", "num_nextn_predict_layers"),
    *("chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"),
    "num_mtp_layers",
    *(
        "residual_dropout",
        "aux_loss_coef",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "input_jitter_noise",
        "altup_coef_clip",
    ),
}
_LATENT = {
    *("deepseek-v3", "deepseek-v2", "sarvam-mla", "mistral4", "mistral4-far"),
    *("glm4-moe-lite", "longcat-flash", "minicpm3", "youtu", "axk1"),
    *("deepseek-v3.2", "glm5-dsa", "glm5-dsa-all", "axk2", "kimi-linear"),
    "bailing-hybrid",
}
_MAMBA = {"mamba", "falcon-mamba", "mamba2"}
_QWEN4 = {"qwen4-exp", "qwen4-exp-all", "qwen4-exp-odd"}
# Fields that another field of the same configuration overrides or switches off.
_OVERRIDDEN = {
    # Any change of the parameters of the rotary embedding is read; none at all are the default's.
    "rope_parameters": set(LOADED),
    "sliding_window": {"qwen3", "qwen3-moe", "qwen2", "smollm3", "qwen2-moe"},
    "use_sliding_window": {"qwen3", "qwen3-moe", "qwen2", "smollm3"},
    "max_window_layers": {"qwen3", "qwen2", "qwen2-moe", "dots1"},
    "sliding_window_pattern": {"exaone4", "exaone-moe", "cohere2-moe"},
    "prefix_dense_sliding_window_pattern": {"cohere2-moe"},
    # The weights of a softmax over the chosen experts add up to 1.
    "norm_topk_prob": {"cohere2-moe", "doge", "doge-window"},
    # The one in `rope_parameters` wins.
    "rope_theta": {"cohere2-moe", "bailing-hybrid"},
    "global_attn_every_n_layers": {"afmoe"},
    # JetMoE has one query per KV head for each expert of a token. Mamba has no attention.
    "num_attention_heads": {"laguna", "laguna-per-element", "jetmoe", *_MAMBA},
    "num_key_value_heads": {"gpt-bigcode", "dbrx", *_MAMBA},
    # No layer has an MLP without experts.
    "intermediate_size": {
        *("kolibri1", "mamba2", "qwen3.5-moe", "qwen4-exp-ple", "zaya", "zaya-skips"),
        *_QWEN4,
    },
    "multi_query": {"falcon"},
    "num_kv_heads": {"falcon-rw"},
    # transformers does not read them.
    "expansion_ratio": {"mpt"},
    "learned_pos_emb": {"mpt"},
    "norm_type": {"mpt"},
    # No layer of Mamba2 has it.
    "time_step_rank": {"mamba2"},
    # The last layer, which is as good as any later one.
    "moe_layer_end_index": {"ernie4.5-moe"},
    "mtp_layer_types": {"mellum2"},
    "mtp_mlp_layer_types": {"mellum2"},
    # It changes how a sum of 16-bit numbers is rounded.
    "enable_moe_fp32_combine": {"hy-v3"},
    "_sliding_window_pattern": {"gemma3"},
    "no_rope_layer_interval": {"llama4", "smollm3"},
    # An empty list means the default.
    "no_rope_layers": {"llama4", "smollm3"},
    "eos_token_id": {"glm4", "glm"},
    "interleave_moe_layer_step": {"llama4"},
    "moe_intermediate_size": {"gemma4-dense", "gemma4-ple"},
    "num_experts": {"gemma4-dense", "gemma4-ple", "doge", "doge-window"},
    # Checkpoints with experts are refused.
    "num_experts_per_tok": {"doge", "doge-window"},
    "top_k_experts": {"gemma4-dense", "gemma4-ple"},
    "vocab_size_per_layer_input": {"gemma4-dense", "gemma4-moe"},
    "original_max_position_embeddings": {"phi3"},
    # The one in `rope_parameters` wins.
    "partial_rotary_factor": {"phi3-longrope"},
    # transformers computes it from widths of latent attention.
    "head_dim": _LATENT,
    # transformers computes it from the other widths of heads.
    "qk_head_dim": _LATENT,
    # `block_auto_adjust_ff_dim` is false.
    "block_multiple_of": {"lfm2"},
    "block_ffn_dim_multiplier": {"lfm2"},
    # The layer with attention is the only one with any larger period too.
    "attn_layer_period": {"jamba", "zamba"},
    # `layers_block_type` wins.
    "attn_layer_offset": {"zamba"},
    # `layers_block_type` wins. transformers does not read the others.
    **dict.fromkeys(
        (
            "hybrid_layer_ids",
            "kv_channels",
            "num_query_groups",
            "use_conv_bias",
            "use_mem_eff_path",
        ),
        {"zamba2", "zamba2-blocks"},
    ),
    # The numbers of heads and their width say how wide all heads are, or `intermediate_size` does.
    "expand": {"nemotron-h", "nemotron-h-latent", "mamba", "falcon-mamba"},
    # Lists of layers and fields that begin with `linear_` win.
    "layer_group_size": {"bailing-hybrid"},
    "short_conv_kernel_size": {"bailing-hybrid"},
    # Tokens that transformers computes together.
    "block_size": {"minimax-01"},
    # `mamba_d_ssm` wins.
    "mamba_expand": {"falcon-h1", "falcon-h1-normed"},
    # The output of Mamba2 is not normed.
    "mamba_norm_before_gate": {"falcon-h1"},
    # `layers_block_type` wins.
    "num_hidden_layers": {"nemotron-h", "nemotron-h-latent"},
    # transformers does not read them.
    "residual_in_fp32": {"nemotron-h", "nemotron-h-latent"},
    "mlp_bias": {"deepseek-v3.2", "glm5-dsa", "glm5-dsa-all"},
    # `mlp_layer_types` wins.
    "first_k_dense_replace": {
        "bailing-hybrid",
        "exaone-moe",
        "deepseek-v3.2",
        "glm5-dsa",
        "glm5-dsa-all",
        "axk2",
    },
    # transformers computes it.
    "number_of_conv_states": {"qwen4-exp-ple", "inkling", "inkling-far", *_QWEN4},
    # No layer has embeddings of n-grams.
    **dict.fromkeys(
        (
            "heads_per_ngram",
            "make_ngram_vocab_size_divisible_by",
            "ngram_size",
            "ngram_vocab_size_base",
            "ple_conv_kernel_size",
            "ple_embed_dim",
            "seed",
            "split_ngram_parts",
        ),
        _QWEN4,
    ),
    # `layer_types` wins.
    "local_layer_ids": {"inkling", "inkling-far"},
    # transformers does not read them.
    "rms_norm_eps_moe_gate": {"inkling", "inkling-far"},
    # `log_scaling_n_floor` is null.
    "log_scaling_alpha": {"inkling"},
    # No groups with `topk_method` "greedy".
    "n_group": {"deepseek-v2"},
    "topk_group": {"deepseek-v2"},
}


@pytest.mark.parametrize("name", LOADED)
def test_every_field_that_may_change_an_answer_is_read(name):
    config = DECODERS[name]()
    config.architectures = [architecture_of(config)]
    hf_config = json.loads(config.to_json_string(use_diff=False))
    ours = read_config(hf_config)
    family = family_class(ours.architecture)
    del hf_config["architectures"]

    def read(**fields: object) -> ModelConfig | None:
        try:
            return family.read_config(hf_config | fields | {"architectures": [ours.architecture]})
        except ModelError:
            return None

    ignored = {
        field
        for field, value in hf_config.items()
        if all(read(**{field: other}) == ours for other in _other_values(value))
    }
    overridden = {field for field, names in _OVERRIDDEN.items() if name in names}
    assert ignored - _WITHOUT_EFFECT <= overridden


def _other_values(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 + 2, value + 2]
    return [6, True, "other", 0.5, [], {}]
