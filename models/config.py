"""`ModelConfig`: what the engine needs to know of a Hugging Face config.json, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.config_fields import read_count, read_flag, read_number, read_token_ids
from models.errors import ModelConfigError, UnsupportedModelError
from models.rope_config import RopeConfig, parse_rope_config

ModelDtype = Literal["float32", "bfloat16", "float16"]

MODEL_DTYPES: tuple[ModelDtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """How an architecture differs from plain Llama, and what its config.json may leave out.

    The defaults are those of Hugging Face's configuration class, so that a config.json that leaves
    a field out means the same model here.
    """

    has_attention_bias_flag: bool = False  # `attention_bias` puts a bias on q, k, v and o
    always_has_qkv_bias: bool = False
    has_mlp_bias_flag: bool = False
    use_qk_norm: bool = False
    default_num_kv_heads: int | None = None  # where it is left out; None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size // num_attention_heads
    sliding_window_rule: Literal["never", "when_set", "when_flagged"] = "never"
    default_sliding_window: int | None = None


# Architecture in config.json -> its traits. `models/registry.py` maps the same names to classes.
FAMILY_TRAITS: dict[str, FamilyTraits] = {
    "LlamaForCausalLM": FamilyTraits(has_attention_bias_flag=True, has_mlp_bias_flag=True),
    "MistralForCausalLM": FamilyTraits(
        default_num_kv_heads=8, sliding_window_rule="when_set", default_sliding_window=4096
    ),
    "Qwen2ForCausalLM": FamilyTraits(
        always_has_qkv_bias=True,
        default_num_kv_heads=32,
        sliding_window_rule="when_flagged",
        default_sliding_window=4096,
    ),
    "Qwen3ForCausalLM": FamilyTraits(
        has_attention_bias_flag=True,
        use_qk_norm=True,
        default_num_kv_heads=32,
        default_head_dim=128,
        sliding_window_rule="when_flagged",
        default_sliding_window=4096,
    ),
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
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    use_qk_norm: bool
    hidden_act: Literal["silu"]
    dtype: ModelDtype  # what the checkpoint says of itself, not what it is loaded as
    initializer_range: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def max_scaled_positions(self) -> int:
        """Most positions that the model can take, once its rotary embedding is scaled.

        A config.json with a factor may state the length before it (Qwen2.5's yarn: 32,768 and a
        factor of 4 are 131,072) or after it (Llama 3.1), so the larger one counts.
        """
        scaled = 0.0
        if self.rope.kind in ("yarn", "dynamic"):
            scaled = self.rope.original_max_position_embeddings * self.rope.factor
        elif self.rope.kind == "linear":
            scaled = self.max_position_embeddings * self.rope.factor
        return max(self.max_position_embeddings, int(scaled))

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, object]) -> "ModelConfig":
        """Reads a config.json, as written by transformers 4 or 5.

        Raises:
            ModelConfigError: A field is missing, of the wrong type, or contradicts another.
            UnsupportedModelError: The model needs something that is not built.
        """
        architecture = _read_architecture(hf_config)
        traits = FAMILY_TRAITS[architecture]
        hidden_size = read_count(hf_config, "hidden_size")
        num_q_heads = read_count(hf_config, "num_attention_heads")
        attention_bias = traits.has_attention_bias_flag and read_flag(hf_config, "attention_bias")
        max_position_embeddings = read_count(hf_config, "max_position_embeddings")
        bos_token_ids = read_token_ids(hf_config, "bos_token_id")
        config = cls(
            architecture=architecture,
            model_type=str(hf_config.get("model_type", "")),
            vocab_size=read_count(hf_config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read_count(hf_config, "intermediate_size"),
            num_layers=read_count(hf_config, "num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=_read_num_kv_heads(hf_config, traits, num_q_heads),
            head_dim=read_count(
                hf_config, "head_dim", traits.default_head_dim or hidden_size // num_q_heads
            ),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=read_number(hf_config, "rms_norm_eps", 1e-6),
            rope=parse_rope_config(hf_config, max_position_embeddings),
            tie_word_embeddings=read_flag(hf_config, "tie_word_embeddings"),
            qkv_bias=attention_bias or traits.always_has_qkv_bias,
            attention_out_bias=attention_bias,
            mlp_bias=traits.has_mlp_bias_flag and read_flag(hf_config, "mlp_bias"),
            use_qk_norm=traits.use_qk_norm,
            hidden_act=_read_hidden_act(hf_config),
            dtype=_read_dtype(hf_config),
            initializer_range=read_number(hf_config, "initializer_range", 0.02),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            eos_token_ids=read_token_ids(hf_config, "eos_token_id"),
        )
        _refuse_quantized(hf_config)
        _refuse_sliding_window(hf_config, traits, max_position_embeddings)
        return config

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


def _read_hidden_act(hf_config: Mapping[str, object]) -> Literal["silu"]:
    # "swish" is the same function under its older name.
    if hf_config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"config.json: hidden_act={hf_config['hidden_act']!r} is not supported; "
            "supported is 'silu'."
        )
    return "silu"


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


def _refuse_sliding_window(
    hf_config: Mapping[str, object], traits: FamilyTraits, max_position_embeddings: int
) -> None:
    """Refuses a window that some position could feel; one as long as the range changes nothing."""
    is_active = traits.sliding_window_rule == "when_set" or (
        traits.sliding_window_rule == "when_flagged" and read_flag(hf_config, "use_sliding_window")
    )
    window = hf_config.get("sliding_window", traits.default_sliding_window)
    if not is_active or window is None:
        return
    window = read_count(hf_config, "sliding_window", traits.default_sliding_window)
    if window < max_position_embeddings:
        # TODO: drop when the KV cache manager has sliding-window groups.
        raise UnsupportedModelError(
            f"config.json: a sliding window of {window} tokens, below "
            f"{max_position_embeddings=}, is active, which is not supported yet. Use a release "
            "with full attention (sliding_window null, or use_sliding_window false)."
        )
