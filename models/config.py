"""`ModelConfig`: what the engine needs to know of a Hugging Face config.json, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.config_fields import (
    read_count,
    read_flag,
    read_number,
    read_optional_number,
    read_token_ids,
)
from models.errors import ModelConfigError, UnsupportedModelError
from models.family_traits import FAMILY_TRAITS, FamilyTraits
from models.layer_types import LayerType, read_layer_types, read_sliding_window
from models.rope_config import (
    RopeConfig,
    max_scaled_positions,
    parse_rope_config,
    parse_ropes_by_layer_type,
)

ModelDtype = Literal["float32", "bfloat16", "float16"]
Activation = Literal["silu", "gelu_pytorch_tanh"]

MODEL_DTYPES: tuple[ModelDtype, ...] = ("float32", "bfloat16", "float16")
# As config.json names them; "swish" is silu under its older name.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model, after every default and old spelling has been resolved."""

    architecture: str  # "LlamaForCausalLM"
    model_type: str  # "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    norm_weight_is_offset: bool  # norms scale by 1 + weight
    embedding_scale: float  # factor of token embeddings on their way in, not in the head
    layer_types: tuple[LayerType, ...]  # one for each layer
    # Of the sliding layers: a token sees itself and the `sliding_window - 1` tokens before it.
    # None where no position of the model would feel it.
    sliding_window: int | None
    rope: RopeConfig  # of full-attention layers
    sliding_rope: RopeConfig  # of sliding layers; most families have one for both
    attention_scale: float  # factor of the products of queries and keys
    attention_soft_cap: float | None  # their bound: cap * tanh(logit / cap)
    logits_soft_cap: float | None  # the same of the vocabulary's logits
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    use_qk_norm: bool
    hidden_act: Activation
    dtype: ModelDtype  # what the checkpoint says of itself, not what it is loaded as
    initializer_range: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    # Sliding layers keep all their keys and values, so that all layers share one block table.
    # A choice of the engine, not of the checkpoint.
    has_unified_kv: bool = False

    def layer_window(self, layer_idx: int) -> int | None:
        """The window of one layer; None is attention to every earlier token."""
        is_sliding = self.layer_types[layer_idx] == "sliding_attention"
        return self.sliding_window if is_sliding else None

    def layer_rope(self, layer_idx: int) -> RopeConfig:
        """The rotary embedding of one layer."""
        is_sliding = self.layer_types[layer_idx] == "sliding_attention"
        return self.sliding_rope if is_sliding else self.rope

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotary embeddings of the layers, in the order of their first layer."""
        return tuple(dict.fromkeys(self.layer_rope(idx) for idx in range(self.num_layers)))

    @property
    def max_scaled_positions(self) -> int:
        """Most positions that the model can take, once its rotary embedding is scaled.

        It goes as far as the least scaled of its layers: Gemma 3 as far as config.json states.
        """
        return min(max_scaled_positions(rope, self.max_position_embeddings) for rope in self.ropes)

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, object]) -> "ModelConfig":
        """Reads a config.json, as written by transformers 4 or 5.

        Raises:
            ModelConfigError: A field is missing, of the wrong type, or contradicts another.
            UnsupportedModelError: The model needs something that is not built.
        """
        architecture = _read_architecture(hf_config)
        traits = FAMILY_TRAITS[architecture]
        _refuse_quantized(hf_config)
        _refuse_bidirectional(hf_config)
        hidden_size = read_count(hf_config, "hidden_size")
        num_layers = read_count(hf_config, "num_hidden_layers")
        num_q_heads = read_count(hf_config, "num_attention_heads")
        head_dim = read_count(
            hf_config, "head_dim", traits.default_head_dim or hidden_size // num_q_heads
        )
        attention_bias = traits.has_attention_bias_flag and read_flag(hf_config, "attention_bias")
        max_position_embeddings = read_count(hf_config, "max_position_embeddings")
        rope, sliding_rope = _read_ropes(hf_config, traits, max_position_embeddings)
        window = read_sliding_window(hf_config, traits)
        layer_types = read_layer_types(
            hf_config, traits, num_layers=num_layers, sliding_window=window
        )
        query_scalar = traits.default_query_scalar and read_number(
            hf_config, "query_pre_attn_scalar", traits.default_query_scalar
        )
        attention_soft_cap, logits_soft_cap = _read_soft_caps(hf_config, traits)
        bos_token_ids = read_token_ids(hf_config, "bos_token_id")
        return cls(
            architecture=architecture,
            model_type=str(hf_config.get("model_type", "")),
            vocab_size=read_count(hf_config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read_count(hf_config, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=_read_num_kv_heads(hf_config, traits, num_q_heads),
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=read_number(hf_config, "rms_norm_eps", 1e-6),
            norm_weight_is_offset=traits.norm_weight_is_offset,
            embedding_scale=hidden_size**0.5 if traits.scales_embeddings else 1.0,
            layer_types=layer_types,
            sliding_window=_window_that_is_felt(window, sliding_rope, max_position_embeddings),
            rope=rope,
            sliding_rope=sliding_rope,
            attention_scale=(query_scalar or head_dim) ** -0.5,
            attention_soft_cap=attention_soft_cap,
            logits_soft_cap=logits_soft_cap,
            tie_word_embeddings=read_flag(
                hf_config, "tie_word_embeddings", traits.default_tie_word_embeddings
            ),
            qkv_bias=attention_bias or traits.always_has_qkv_bias,
            attention_out_bias=attention_bias,
            mlp_bias=traits.has_mlp_bias_flag and read_flag(hf_config, "mlp_bias"),
            use_qk_norm=traits.use_qk_norm,
            hidden_act=_read_activation(hf_config, traits),
            dtype=_read_dtype(hf_config),
            initializer_range=read_number(hf_config, "initializer_range", 0.02),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            eos_token_ids=read_token_ids(hf_config, "eos_token_id"),
        )

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"config.json: num_attention_heads={self.num_q_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}; wanted one: every KV head serves "
                "equally many query heads."
            )
        if self.head_dim % 2:
            raise ModelConfigError(
                f"config.json: head_dim={self.head_dim} is odd; rotary embeddings turn pairs of "
                "dimensions and want an even one."
            )


def _read_architecture(hf_config: Mapping[str, object]) -> str:
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelConfigError(
            f"config.json: architectures is {architectures!r}; wanted a list that names one of "
            f"{', '.join(FAMILY_TRAITS)}."
        )
    if architectures[0] not in FAMILY_TRAITS:
        raise UnsupportedModelError(
            f"config.json: architecture {architectures[0]!r} is not supported; supported are "
            f"{', '.join(FAMILY_TRAITS)}."
        )
    return architectures[0]


def _read_num_kv_heads(
    hf_config: Mapping[str, object], traits: FamilyTraits, num_q_heads: int
) -> int:
    # As in transformers, null is as many as query heads; only a field left out is the default.
    is_left_out = "num_key_value_heads" not in hf_config
    default = traits.default_num_kv_heads if is_left_out else None
    return read_count(hf_config, "num_key_value_heads", default or num_q_heads)


def _read_ropes(
    hf_config: Mapping[str, object], traits: FamilyTraits, max_position_embeddings: int
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of full-attention and of sliding layers."""
    if traits.has_rope_per_layer_type:
        return parse_ropes_by_layer_type(hf_config, max_position_embeddings)
    rope = parse_rope_config(hf_config, max_position_embeddings)
    return rope, rope


def _read_soft_caps(
    hf_config: Mapping[str, object], traits: FamilyTraits
) -> tuple[float | None, float | None]:
    """The soft caps of attention and of the vocabulary's logits; null is none."""
    if not traits.has_soft_caps:
        return None, None
    defaults = {
        "attn_logit_softcapping": traits.default_attention_soft_cap,
        "final_logit_softcapping": traits.default_logits_soft_cap,
    }
    attention_cap, logits_cap = (
        read_optional_number({name: hf_config.get(name, default)}, name)
        for name, default in defaults.items()
    )
    if attention_cap is not None and traits.refuses_attention_soft_cap:
        raise UnsupportedModelError(
            f"config.json: attn_logit_softcapping={attention_cap:g} is not supported for this "
            "architecture, which no release sets; wanted null."
        )
    return attention_cap, logits_cap


def _read_activation(hf_config: Mapping[str, object], traits: FamilyTraits) -> Activation:
    name = hf_config.get(traits.activation_field) or traits.default_activation
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: {traits.activation_field}={name!r} is not supported; "
            f"supported are {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


def _read_dtype(hf_config: Mapping[str, object]) -> ModelDtype:
    # transformers 5 renamed torch_dtype to dtype. Without either, the weights are float32.
    name = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    for dtype in MODEL_DTYPES:
        if name in (dtype, f"torch.{dtype}"):
            return dtype
    raise UnsupportedModelError(
        f"config.json: dtype {name!r} is not supported; supported are {', '.join(MODEL_DTYPES)}."
    )


def _refuse_quantized(hf_config: Mapping[str, object]) -> None:
    quantization = hf_config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise UnsupportedModelError(
            f"config.json: the weights are quantized (quant_method={method!r}), which is not "
            "supported. Use the unquantized release of this model."
        )


def _refuse_bidirectional(hf_config: Mapping[str, object]) -> None:
    if hf_config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "config.json: use_bidirectional_attention is set, so tokens see later ones, which is "
            "not supported: such a model makes embeddings and generates no text."
        )


def _window_that_is_felt(
    window: int | None, rope: RopeConfig, max_position_embeddings: int
) -> int | None:
    """The window, or None if it reaches back to position 0 from every position."""
    if window is None or window >= max_scaled_positions(rope, max_position_embeddings):
        return None
    return window
