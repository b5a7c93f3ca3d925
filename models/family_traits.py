"""How architectures differ from plain Llama, and what their config.json may leave out."""

from dataclasses import dataclass
from typing import Literal

# Which layers attend to a sliding window, if the model has one:
# - every_layer: all of them
# - flagged: those from `max_window_layers` on, if `use_sliding_window` says so
# - pattern: all but every so many-th
# `layer_types`, where it is written, replaces the last two.
WindowRule = Literal["never", "every_layer", "flagged", "pattern"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """One family. The defaults of fields are those of Hugging Face's configuration class.

    So a config.json that leaves a field out means the same model here.
    """

    has_attention_bias_flag: bool = False  # `attention_bias` puts a bias on q, k, v and o
    always_has_qkv_bias: bool = False
    has_mlp_bias_flag: bool = False
    use_qk_norm: bool = False
    # A norm's weight is the difference to 1, and is added in float32.
    norm_weight_is_offset: bool = False
    scales_embeddings: bool = False  # by sqrt(hidden_size)
    activation_field: str = "hidden_act"
    default_activation: str = "silu"
    default_num_kv_heads: int | None = None  # where it is left out; None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size // num_attention_heads
    default_tie_word_embeddings: bool = False
    # `query_pre_attn_scalar` where it is left out; None: the field means nothing, and head_dim
    # takes its place.
    default_query_scalar: float | None = None
    has_soft_caps: bool = False  # `attn_logit_softcapping`, `final_logit_softcapping`
    default_attention_soft_cap: float | None = None
    default_logits_soft_cap: float | None = None
    # transformers ignores `attn_logit_softcapping`, and other engines do not.
    refuses_attention_soft_cap: bool = False
    window_rule: WindowRule = "never"
    default_sliding_window: int | None = None
    default_window_pattern: int = 1
    has_window_pattern_field: bool = False  # `sliding_window_pattern` may say another one
    # Sliding and full layers have rotary embeddings of their own.
    has_rope_per_layer_type: bool = False


_GEMMA2 = FamilyTraits(
    has_attention_bias_flag=True,
    norm_weight_is_offset=True,
    scales_embeddings=True,
    activation_field="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    default_num_kv_heads=4,
    default_head_dim=256,
    default_tie_word_embeddings=True,
    default_query_scalar=256.0,
    has_soft_caps=True,
    default_attention_soft_cap=50.0,
    default_logits_soft_cap=30.0,
    window_rule="pattern",
    default_sliding_window=4096,
    default_window_pattern=2,
)

_GEMMA3 = FamilyTraits(
    has_attention_bias_flag=True,
    use_qk_norm=True,
    norm_weight_is_offset=True,
    scales_embeddings=True,
    activation_field="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    default_num_kv_heads=4,
    default_head_dim=256,
    default_tie_word_embeddings=True,
    default_query_scalar=256.0,
    has_soft_caps=True,
    refuses_attention_soft_cap=True,
    window_rule="pattern",
    default_sliding_window=4096,
    default_window_pattern=6,
    has_window_pattern_field=True,
    has_rope_per_layer_type=True,
)

# Architecture in config.json -> its traits. `models/registry.py` maps the same names to classes.
FAMILY_TRAITS: dict[str, FamilyTraits] = {
    "LlamaForCausalLM": FamilyTraits(has_attention_bias_flag=True, has_mlp_bias_flag=True),
    "MistralForCausalLM": FamilyTraits(
        default_num_kv_heads=8, window_rule="every_layer", default_sliding_window=4096
    ),
    "Qwen2ForCausalLM": FamilyTraits(
        always_has_qkv_bias=True,
        default_num_kv_heads=32,
        window_rule="flagged",
        default_sliding_window=4096,
    ),
    "Qwen3ForCausalLM": FamilyTraits(
        has_attention_bias_flag=True,
        use_qk_norm=True,
        default_num_kv_heads=32,
        default_head_dim=128,
        window_rule="flagged",
        default_sliding_window=4096,
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
}
