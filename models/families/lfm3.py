"""LFM3: LFM2 with wider convolutions, sliding windows, gated attention, norms after each part."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, with_defaults, with_main_names
from models.config.layer_types import read_sliding_window, with_window
from models.config.rope_config import parse_ropes_by_layer_type
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.dense_decoder import DenseDecoder
from models.errors import ModelConfigError
from models.families.lfm2 import STORED_NAMES
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer, SandwichNormLayer
from models.layers.dense_layers import make_head_normed_attention
from models.layers.gated_attention import GatedAttention
from models.layers.gated_short_convolution import (
    CONV,
    GatedShortConvolution,
    GatedShortConvolutionConfig,
)
from models.layers.mixer_rules import with_renamed_mixers
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import WeightRule, with_stored_names

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 124_894,
    "eos_token_id": 124_900,
    "tie_word_embeddings": True,
    "rope_parameters": {
        _FULL: {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.5,
        },
        _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
_SANDWICH_NAMES = {
    ".post_attention_layernorm.": ".post_operator_norm.",
    ".pre_feedforward_layernorm.": ".ffn_norm.",
    ".post_feedforward_layernorm.": ".post_ffn_norm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm3Config(DenseConfig):
    """The config of LFM3. Layers without attention have a `GatedShortConvolution`.

    Args:
        has_output_norms: Whether the outputs of mixers and MLPs are normed.
        has_gates: Whether each head of attention has a gate.
    """

    conv: GatedShortConvolutionConfig
    has_output_norms: bool
    has_gates: bool

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, CONV, self.conv.format())


class Lfm3ForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/lfm3."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Lfm3Config:
        hf_config = with_main_names(hf_config, {"norm_eps": "rms_norm_eps"})
        hf_config = with_defaults(hf_config, _DEFAULTS) | {"hidden_act": "silu"}
        fields = read_dense_fields(hf_config)
        return Lfm3Config(
            **fields,
            attention=_read_attention(
                hf_config, fields["num_layers"], fields["max_position_embeddings"]
            ),
            conv=GatedShortConvolutionConfig(
                hidden_size=fields["hidden_size"],
                kernel_size=read_count(hf_config, "conv_L_cache", 7, minimum=2),
                use_bias=read_flag(hf_config, "conv_bias"),
            ),
            has_output_norms=read_flag(hf_config, "use_sandwich_norm", True),
            has_gates=read_flag(hf_config, "use_attention_gate", True),
        )

    def __init__(self, config: Lfm3Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention_class = Attention
        if config.has_gates:
            attention_class = functools.partial(
                GatedAttention, gate=jax.nn.sigmoid, is_per_head=True
            )

        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return GatedShortConvolution(config.conv, dtype=dtype)
            return make_head_normed_attention(
                attention, norm=norm, attention=attention_class, dtype=dtype
            )

        super().__init__(
            config,
            layer=SandwichNormLayer if config.has_output_norms else PreNormLayer,
            attention=make_mixer,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have LFM2's names for MLPs and norms of layers."""
        rules = with_renamed_mixers(super().weight_rules(), self.config.attention, CONV)
        names = {
            own: stored for own, stored in STORED_NAMES.items() if not own.startswith(".self_attn.")
        }
        if self.config.has_output_norms:
            names |= _SANDWICH_NAMES
        return with_stored_names(rules, names)


def _read_attention(
    hf_config: Mapping[str, object], num_layers: int, max_positions: int
) -> tuple[AttentionConfig | None, ...]:
    """The attention of each layer; None for layers with a convolution.

    Raises:
        ModelConfigError: `layer_types` is not a list with a known name for each layer, or the model
            has sliding layers and no window.
    """
    by_rule = ["conv", "conv", _FULL, "conv", *[_SLIDING, "conv", _FULL, "conv"] * num_layers]
    types = hf_config.get("layer_types") or by_rule[:num_layers]
    known = (CONV, _FULL, _SLIDING)
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(name not in known for name in types)
    ):
        raise ModelConfigError(
            f"config.json: layer_types is {types!r}; expected a list of {num_layers} names, one "
            f"for each layer, of {', '.join(known)}."
        )
    window = read_sliding_window(hf_config, default=256)
    if window is None and _SLIDING in types:
        raise ModelConfigError(
            "config.json: layer_types has sliding layers, and sliding_window is null; expected a "
            "window. Use the config.json that was published with the weights."
        )
    full_rope, sliding_rope = parse_ropes_by_layer_type(
        hf_config, max_positions, required_types={*types} - {CONV}
    )
    heads = read_head_fields(hf_config, default_num_kv_heads=4, default_head_dim=128)
    has_bias = read_flag(hf_config, "attention_bias")
    biases = {"qkv_bias": has_bias, "out_bias": has_bias}
    sliding = AttentionConfig(**heads, rope=sliding_rope, **biases)
    of_types = {
        CONV: None,
        _FULL: AttentionConfig(**heads, rope=full_rope, **biases),
        _SLIDING: with_window(sliding, window, max_positions),
    }
    return tuple(of_types[name] for name in types)
