"""Laguna: gated attention, numbers of heads that differ by layer, and experts in most layers."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import (
    read_count,
    read_number,
    refuse_other_values,
)
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import read_expert_fields, read_mlp_layer_types
from models.config.partial_rotary import attention_of_ropes, without_rotary_factor
from models.config.rope_config import parse_ropes_by_layer_type, with_default_rope
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.errors import ModelConfigError
from models.layers.dense_layers import make_head_normed_attention
from models.layers.gated_attention import GatedAttention
from models.layers.rms_norm import RMSNorm
from models.layers.routing import SigmoidTopK
from models.layers.routing_rules import SoftCappedSigmoidTopK
from models.weight_rule import WeightRule, with_renamed_sources

_DEFAULT_ROPE = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0},
}
# Values of `gating` -> whether a head has one factor.
_GATINGS = {True: True, "per-head": True, "per-element": False}
_SUPPORTED = {"moe_apply_router_weight_on_input": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LagunaConfig(CorrectedMoEConfig):
    """The config of Laguna."""

    gates_per_head: bool  # whether a head of attention has one factor


class LagunaForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/laguna."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LagunaConfig:
        hf_config = with_default_rope(hf_config, _DEFAULT_ROPE)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        num_layers = fields["num_layers"]
        experts = read_expert_fields(
            hf_config, default_num_experts=256, default_top_k=8, default_size=512
        )
        gating = hf_config.get("gating", True)
        if not isinstance(gating, bool | str) or gating not in _GATINGS:
            raise ModelConfigError(
                f"config.json: gating is {gating!r}; expected true, 'per-head' or 'per-element'."
            )
        return LagunaConfig(
            **fields,
            **experts,
            attention=_read_attention(hf_config, num_layers, fields["max_position_embeddings"]),
            has_experts=read_mlp_layer_types(
                hf_config, tuple(layer_idx > 0 for layer_idx in range(num_layers))
            ),
            choose=_read_choice(hf_config, experts["num_experts_per_tok"]),
            shared_intermediate_size=read_count(hf_config, "shared_expert_intermediate_size", 512),
            gates_per_head=_GATINGS[gating],
        )

    def __init__(self, config: LagunaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention = functools.partial(
            GatedAttention, gate=jax.nn.softplus, is_per_head=config.gates_per_head
        )
        super().__init__(
            config,
            attention=functools.partial(
                make_head_normed_attention, norm=norm, attention=attention, dtype=dtype
            ),
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for gates, corrections and the shared expert."""

        def rename(name: str) -> str:
            name = name.replace(".self_attn.gate_proj.", ".self_attn.g_proj.")
            name = name.replace(".mlp.gate.e_score", ".mlp.experts.e_score")
            return name.replace(".shared_experts.", ".shared_expert.")

        return with_renamed_sources(super().weight_rules(), rename)


def _read_choice(hf_config: Mapping[str, object], top_k: int) -> SigmoidTopK:
    factor = read_number(hf_config, "moe_routed_scaling_factor", 1.0)
    if not hf_config.get("moe_router_logit_softcapping"):
        return SigmoidTopK(top_k=top_k, factor=factor)
    cap = read_number(hf_config, "moe_router_logit_softcapping")
    return SoftCappedSigmoidTopK(top_k=top_k, factor=factor, cap=cap)


def _read_attention(
    hf_config: Mapping[str, object], num_layers: int, max_positions: int
) -> tuple[AttentionConfig, ...]:
    heads = read_head_fields(hf_config, default_num_kv_heads=8, default_head_dim=128)
    full_rope, sliding_rope = parse_ropes_by_layer_type(
        without_rotary_factor(hf_config), max_positions
    )
    full, sliding = attention_of_ropes(
        hf_config, heads, full_rope=full_rope, sliding_rope=sliding_rope
    )
    layers = attention_by_type(
        hf_config,
        [False] * num_layers,
        full=full,
        sliding=sliding,
        window=read_sliding_window(hf_config, default=512),
        max_position_embeddings=max_positions,
    )
    nums_heads = _read_nums_heads(hf_config, [heads["num_q_heads"]] * num_layers)
    return tuple(
        dataclasses.replace(layer, num_q_heads=num_heads)
        for layer, num_heads in zip(layers, nums_heads, strict=True)
    )


def _read_nums_heads(hf_config: Mapping[str, object], default: list[int]) -> list[int]:
    """The number of query heads of each layer."""
    name = "num_attention_heads_per_layer"
    written = hf_config.get(name)
    if written is None:
        return default
    if not isinstance(written, list) or len(written) != len(default):
        raise ModelConfigError(
            f"config.json: {name} is {written!r}; expected a list of {len(default)} numbers, one "
            "for each layer."
        )
    return [read_count({name: num_heads}, name) for num_heads in written]
