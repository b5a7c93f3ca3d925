"""MiMo-V2-Flash: experts in most layers, values narrower than keys, partial rotary embeddings, and
sliding layers with sinks and more KV heads. The published weights are FP8.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, read_number, refuse_other_values
from models.config.layer_types import read_layer_types, with_window
from models.config.moe_config import (
    MoEConfig,
    read_corrected_choice,
    read_expert_fields,
    read_mlp_layer_types,
)
from models.config.partial_rotary import read_rotary_factor, without_rotary_factor
from models.config.rope_config import parse_ropes_by_layer_type
from models.decoders.moe_decoder import MoEDecoder
from models.errors import ModelConfigError, UnsupportedModelError
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.experts import make_experts
from models.layers.rms_norm import RMSNorm
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import WeightRule

_DEFAULT_FACTOR = 0.334
# Fields that only the config.json on the hub has.
_ROUTING_OF_HUB = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": 0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MiMoV2Config(MoEConfig):
    """The config of MiMo-V2-Flash."""

    value_scale: float  # a factor of all values
    routing: SigmoidTopK


class MiMoV2FlashForCausalLM(MoEDecoder):
    """Source: huggingface.co/XiaomiMiMo/MiMo-V2-Flash."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MiMoV2Config:
        fields = read_dense_fields({**hf_config, "rms_norm_eps": _read_eps(hf_config)})
        expert_fields = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_num_experts=256,
            default_top_k=8,
            default_size=2048,
        )
        refuse_other_values(hf_config, _ROUTING_OF_HUB)
        # A null means no scale. A missing field means the default.
        value_scale = hf_config.get("attention_value_scale", 0.707)
        return MiMoV2Config(
            **fields,
            **expert_fields,
            attention=_read_attention(hf_config, fields),
            has_experts=_read_has_experts(hf_config, fields["num_layers"]),
            routing=read_corrected_choice(hf_config, expert_fields),
            value_scale=read_number(
                {"attention_value_scale": value_scale}, "attention_value_scale", 1.0
            ),
        )

    def __init__(self, config: MiMoV2Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            attention=functools.partial(
                MiMoV2Attention, value_scale=config.value_scale, dtype=dtype
            ),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def ignores_weight(self, name: str) -> bool:
        # Layers for multi-token prediction.
        return name.startswith("model.mtp.")


class MiMoV2Attention(Attention):
    """Attention whose values are multiplied by a constant, with other names for sinks."""

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


def _make_sparse_mlp(config: MiMoV2Config, dtype: jnp.dtype) -> SparseMLP:
    return SparseMLP(
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=config.routing,
        experts=make_experts(config, dtype=dtype),
    )


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each layer. Sliding layers have sinks and twice as many KV heads."""
    num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
    window = _read_window(hf_config)
    is_sliding = _read_pattern(hf_config, "hybrid_layer_pattern", num_layers) or [
        layer_idx > 0 and (layer_idx + 1) % 6 != 0 for layer_idx in range(num_layers)
    ]
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    ropes = hf_config.get("rope_parameters")
    hf_config = {**hf_config, "rope_parameters": _hub_ropes(hf_config) if ropes is None else ropes}
    rope, sliding_rope = parse_ropes_by_layer_type(
        without_rotary_factor(hf_config), max_positions, required_types=set(layer_types)
    )
    full = AttentionConfig(
        **read_head_fields(hf_config, default_num_kv_heads=4, default_head_dim=192),
        v_head_dim=read_count(hf_config, "v_head_dim", 128),
        rope=rope,
        qkv_bias=read_flag(hf_config, "attention_bias"),
    )
    full = _with_rotary_dim(full, hf_config, "full_attention")
    if full.num_q_heads % (2 * full.num_kv_heads):
        raise ModelConfigError(
            f"config.json: num_attention_heads={full.num_q_heads} is not a multiple of "
            f"{2 * full.num_kv_heads}. Sliding layers have twice as many KV heads as "
            f"num_key_value_heads={full.num_kv_heads}; expected a multiple."
        )
    sliding = dataclasses.replace(
        full, rope=sliding_rope, num_kv_heads=2 * full.num_kv_heads, has_sinks=True
    )
    sliding = _with_rotary_dim(sliding, hf_config, "sliding_attention")
    _check_hub_fields(hf_config, sliding)
    by_type = {
        "full_attention": full,
        "sliding_attention": with_window(sliding, window, max_positions),
    }
    return tuple(by_type[layer_type] for layer_type in layer_types)


def _with_rotary_dim(
    attention: AttentionConfig, hf_config: Mapping[str, object], layer_type: str
) -> AttentionConfig:
    """The attention with the `rotary_dim` that the rope parameters of the layer type give.

    Raises:
        UnsupportedModelError: The parameters name another kind of rotary embedding than "default".
    """
    if attention.rope.kind != "default":
        raise UnsupportedModelError(
            f"config.json: rope type {attention.rope.kind!r} is not supported for "
            f"MiMoV2FlashForCausalLM, which rotates a part of each head; expected 'default'."
        )
    by_type = {**hf_config, "rope_parameters": hf_config["rope_parameters"].get(layer_type)}
    factor = read_rotary_factor(by_type, default=_DEFAULT_FACTOR)
    return dataclasses.replace(attention, rotary_dim=int(attention.head_dim * factor))


def _read_window(hf_config: Mapping[str, object]) -> int:
    """Reads how many positions a token sees, itself included.

    `sliding_window_size` does not count the token itself, and `sliding_window` does.
    """
    if hf_config.get("sliding_window_size") is not None:
        return read_count(hf_config, "sliding_window_size") + 1
    return read_count({"sliding_window": 129, **hf_config}, "sliding_window")


def _read_eps(hf_config: Mapping[str, object]) -> float:
    for name in ("rms_norm_eps", "layernorm_epsilon"):
        if name in hf_config:
            return read_number(hf_config, name)
    return 1e-5


def _hub_ropes(hf_config: Mapping[str, object]) -> dict[str, dict[str, float]]:
    """Makes `rope_parameters` from `rope_theta` and `swa_rope_theta`, the names on the hub."""
    return {
        "full_attention": {"rope_theta": read_number(hf_config, "rope_theta", 5e6)},
        "sliding_attention": {"rope_theta": read_number(hf_config, "swa_rope_theta", 1e4)},
    }


def _read_pattern(hf_config: Mapping[str, object], name: str, num_layers: int) -> list[bool] | None:
    """Reads a list with a 0 or 1 for each layer; None if it is missing or null."""
    pattern = hf_config.get(name)
    if pattern is None:
        return None
    if (
        not isinstance(pattern, list)
        or len(pattern) != num_layers
        or any(value not in (0, 1) for value in pattern)
    ):
        raise ModelConfigError(
            f"config.json: {name} is {pattern!r}; expected a list of {num_layers} numbers, 0 or 1, "
            "one for each layer."
        )
    return [value == 1 for value in pattern]


def _check_hub_fields(hf_config: Mapping[str, object], sliding: AttentionConfig) -> None:
    """Raises if a field that only the hub writes contradicts the layers."""
    used = {
        "swa_num_attention_heads": sliding.num_q_heads,
        "swa_num_key_value_heads": sliding.num_kv_heads,
        "swa_head_dim": sliding.head_dim,
        "swa_v_head_dim": sliding.value_head_dim,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    for name, value in used.items():
        if hf_config.get(name) not in (None, value):
            raise UnsupportedModelError(
                f"config.json: {name} is {hf_config[name]!r}, which is not supported for "
                f"MiMoV2FlashForCausalLM with the other fields; expected {value!r}."
            )


def _read_has_experts(hf_config: Mapping[str, object], num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts: by default all but the first do."""
    pattern = _read_pattern(hf_config, "moe_layer_freq", num_layers)
    if pattern is None:
        pattern = [layer_idx > 0 for layer_idx in range(num_layers)]
    return read_mlp_layer_types(hf_config, pattern)
