"""MiMo-V2-Flash: narrow values, and sinks and more KV heads in its sliding layers.

Its expert layers are not built, so a checkpoint loads if all of its MLPs are dense.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.attention_config import AttentionConfig
from models.config_fields import read_count, read_flag, read_number
from models.decoder import Decoder
from models.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.errors import ModelConfigError, UnsupportedModelError
from models.layer_context import LayerContext
from models.layer_types import read_layer_types, with_window
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm
from models.partial_rotary import read_rotary_factor, without_rotary_factor
from models.rope_config import parse_ropes_by_layer_type
from models.weight_rule import WeightRule

_DEFAULT_FACTOR = 0.334
_DEFAULT_ROPES = {
    "full_attention": {"rope_theta": 5_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MiMoV2Config(DenseConfig):
    """Values are multiplied by a constant."""

    value_scale: float


class MiMoV2FlashForCausalLM(Decoder):
    """Source: huggingface.co/XiaomiMiMo/MiMo-V2-Flash."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MiMoV2Config:
        fields = read_dense_fields({"rms_norm_eps": 1e-5, **hf_config})
        _refuse_experts(hf_config, fields["num_layers"])
        # Null is no scale; only a field left out is the default.
        value_scale = hf_config.get("attention_value_scale", 0.707)
        return MiMoV2Config(
            **fields,
            attention=_read_attention(hf_config, fields),
            value_scale=read_number(
                {"attention_value_scale": value_scale}, "attention_value_scale", 1.0
            ),
        )

    def __init__(self, config: MiMoV2Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        layers = [
            PreNormLayer(
                attention=MiMoV2Attention(attention, value_scale=config.value_scale, dtype=dtype),
                mlp=GatedMLP(
                    config.hidden_size,
                    config.intermediate_size,
                    activation=config.hidden_act,
                    dtype=dtype,
                ),
                norm=norm,
            )
            for attention in config.attention
        ]
        super().__init__(
            config, layers=layers, norm=norm(), has_head_kernel=has_head_kernel, dtype=dtype
        )

    def ignores_weight(self, name: str) -> bool:
        # Layers that predict further tokens.
        return name.startswith("model.mtp.")


class MiMoV2Attention(Attention):
    """Attention with values times a constant, and the hub's name for sinks."""

    def __init__(self, config: AttentionConfig, *, value_scale: float, dtype: jnp.dtype) -> None:
        super().__init__(config, dtype=dtype)
        self.value_scale = value_scale

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        rules = super().weight_rules(name)
        if "sinks" in rules:
            (source,) = rules["sinks"].sources
            source = dataclasses.replace(source, name=f"{name}.attention_sink_bias")
            rules["sinks"] = dataclasses.replace(rules["sinks"], sources=(source,))
        return rules

    def _project_keys_and_values(
        self, normed: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        k, v = super()._project_keys_and_values(normed, context)
        return k, v * self.value_scale


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[AttentionConfig, ...]:
    """The attention of each layer. Sliding layers have twice the KV heads, and sinks."""
    num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
    ropes = hf_config.get("rope_parameters") or _DEFAULT_ROPES
    hf_config = {**hf_config, "rope_parameters": ropes}
    rope, sliding_rope = parse_ropes_by_layer_type(without_rotary_factor(hf_config), max_positions)
    full = AttentionConfig(
        **read_head_fields(hf_config, default_num_kv_heads=4, default_head_dim=192),
        v_head_dim=read_count(hf_config, "v_head_dim", 128),
        rope=rope,
        qkv_bias=read_flag(hf_config, "attention_bias"),
    )
    full = _with_rotary_dim(full, hf_config, "full_attention")
    sliding = dataclasses.replace(
        full, rope=sliding_rope, num_kv_heads=2 * full.num_kv_heads, has_sinks=True
    )
    sliding = _with_rotary_dim(sliding, hf_config, "sliding_attention")
    window = _read_window(hf_config)
    by_type = {
        "full_attention": full,
        "sliding_attention": with_window(sliding, window, max_positions),
    }
    is_sliding = [layer_idx > 0 and (layer_idx + 1) % 6 != 0 for layer_idx in range(num_layers)]
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    return tuple(by_type[layer_type] for layer_type in layer_types)


def _with_rotary_dim(
    attention: AttentionConfig, hf_config: Mapping[str, object], layer_type: str
) -> AttentionConfig:
    """With the share of each head turned that the layer type's rope parameters say.

    Raises:
        UnsupportedModelError: They say another kind of rotary embedding than the default one.
    """
    if attention.rope.kind != "default":
        raise UnsupportedModelError(
            f"config.json: rope type {attention.rope.kind!r} is not supported for "
            f"MiMoV2FlashForCausalLM, which turns a part of each head; wanted 'default'."
        )
    by_type = {**hf_config, "rope_parameters": hf_config["rope_parameters"][layer_type]}
    factor = read_rotary_factor(by_type, default=_DEFAULT_FACTOR)
    return dataclasses.replace(attention, rotary_dim=int(attention.head_dim * factor))


def _read_window(hf_config: Mapping[str, object]) -> int:
    """Positions that a token sees. `sliding_window_size` leaves the token itself out."""
    if hf_config.get("sliding_window_size") is not None:
        return read_count(hf_config, "sliding_window_size") + 1
    return read_count(hf_config, "sliding_window", 129)


def _refuse_experts(hf_config: Mapping[str, object], num_layers: int) -> None:
    written = hf_config.get("mlp_layer_types")
    types = written or ["dense"] + ["sparse"] * (num_layers - 1)
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelConfigError(
            f"config.json: mlp_layer_types is {written!r}; wanted a list of {num_layers} names, "
            "one for each layer."
        )
    num_experts = sum(name != "dense" for name in types)
    if num_experts:
        raise UnsupportedModelError(
            f"config.json: mlp_layer_types says that {num_experts} of {num_layers} layers have "
            "experts, which are not built for MiMoV2FlashForCausalLM yet; wanted 'dense' for every "
            "layer."
        )
