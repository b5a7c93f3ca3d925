"""Lara Mini: Gated DeltaNet, sliding windows, full layers without positions, and experts."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_count, read_flag, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import read_expert_fields
from models.config.state_layers import read_has_state
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import SharedMoEConfig, make_shared_experts
from models.layers.dense_layers import make_head_normed_attention
from models.layers.experts import packed_or_single_rules
from models.layers.gated_delta_net import LINEAR_ATTENTION, GatedDeltaNet, GatedDeltaNetConfig
from models.layers.mixer_rules import with_renamed_mixers
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.self_attention import SelfAttention
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import WeightRule, with_stored_names

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
# The types of layers repeat in this order if config.json does not list them.
_PERIOD = (_LINEAR, _SLIDING, _LINEAR, _FULL, _SLIDING)
# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "eos_token_id": 151_643,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaraMiniConfig(SharedMoEConfig):
    """The config of Lara Mini. Layers without attention have a `GatedDeltaNet`."""

    linear: GatedDeltaNetConfig
    choose: SoftmaxTopK

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, LINEAR_ATTENTION, self.linear.format())


class LaraMiniForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/lara_mini."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LaraMiniConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS) | {
            # No layer has an MLP of this width.
            "intermediate_size": read_count(hf_config, "moe_intermediate_size", 512)
        }
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config, default_num_experts=128, default_top_k=4, default_size=512
        )
        return LaraMiniConfig(
            **fields,
            **experts,
            attention=_read_attention(hf_config, fields),
            has_experts=(True,) * fields["num_layers"],
            shared_intermediate_size=read_count(hf_config, "shared_expert_intermediate_size", 512),
            linear=GatedDeltaNetConfig(
                hidden_size=fields["hidden_size"],
                num_k_heads=read_count(hf_config, "linear_num_key_heads", 8),
                num_v_heads=read_count(hf_config, "linear_num_value_heads", 16),
                k_dim=read_count(hf_config, "linear_key_head_dim", 128),
                v_dim=read_count(hf_config, "linear_value_head_dim", 128),
                kernel_size=read_count(hf_config, "linear_conv_kernel_dim", 4),
                eps=fields["rms_norm_eps"],
            ),
            choose=SoftmaxTopK(
                top_k=experts["num_experts_per_tok"],
                normalizes=read_flag(hf_config, "norm_topk_prob", True),
            ),
        )

    def __init__(self, config: LaraMiniConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)

        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return GatedDeltaNet(config.linear, dtype=dtype)
            return make_head_normed_attention(attention, norm=norm, dtype=dtype)

        super().__init__(
            config,
            attention=make_mixer,
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have one matrix for all projections of a `GatedDeltaNet`."""
        config = self.config
        rules = with_renamed_mixers(super().weight_rules(), config.attention, LINEAR_ATTENTION)
        for layer_idx, attention in enumerate(config.attention):
            if attention is None:
                _read_joined(rules, f"layers.{layer_idx}.self_attn.", config.linear)
        mixer = f".{LINEAR_ATTENTION}."
        names = {f"{mixer}norm.": f"{mixer}out_norm.", ".shared_experts.": ".shared_expert."}
        return packed_or_single_rules(with_stored_names(rules, names))


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[AttentionConfig | None, ...]:
    num_layers = fields["num_layers"]
    by_rule = [_PERIOD[layer_idx % len(_PERIOD)] for layer_idx in range(num_layers)]
    hf_config = with_defaults(hf_config, {"layer_types": by_rule})
    has_state = read_has_state(hf_config, by_rule, _LINEAR, others=(_FULL, _SLIDING))
    sliding = read_attention(
        hf_config,
        fields,
        has_bias=read_flag(hf_config, "attention_bias"),
        default_num_kv_heads=4,
        default_head_dim=128,
    )
    types = [
        _FULL if is_state else written
        for written, is_state in zip(hf_config["layer_types"], has_state, strict=True)
    ]
    attention = attention_by_type(
        {**hf_config, "layer_types": types},
        [False] * num_layers,
        full=replace(sliding, has_positions=False),
        sliding=sliding,
        window=read_sliding_window(hf_config, default=512),
        max_position_embeddings=fields["max_position_embeddings"],
    )
    return tuple(
        None if is_state else of_layer
        for is_state, of_layer in zip(has_state, attention, strict=True)
    )


def _read_joined(rules: dict[str, WeightRule], prefix: str, config: GatedDeltaNetConfig) -> None:
    """Replaces the rules of two projections, which are rows of one stored matrix."""
    widths = {
        "in_proj_qkvz": config.num_channels + config.v_width,
        "in_proj_ba": 2 * config.num_v_heads,
    }
    start = 0
    for name, width in widths.items():
        rule = rules[f"{prefix}{name}.kernel"]
        (own,) = rule.sources
        joined = replace(
            own,
            name=own.name.replace(name, "in_proj"),
            shape=(sum(widths.values()), config.hidden_size),
        )
        take = functools.partial(_take_rows, start=start, end=start + width)
        rules[f"{prefix}{name}.kernel"] = replace(rule, sources=(joined,), combine=take)
        start += width


def _take_rows(weights_np: Sequence[np.ndarray], *, start: int, end: int) -> np.ndarray:
    (weight_np,) = weights_np
    return weight_np[start:end]


def _make_sparse_mlp(config: LaraMiniConfig, dtype: jnp.dtype) -> SparseMLP:
    gate = Router(config.hidden_size, config.num_experts, dtype=jnp.dtype("float32"))
    return make_shared_experts(config, gate=gate, choose=config.choose, dtype=dtype)
