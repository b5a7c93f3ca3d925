"""Kimi Linear: experts, and Kimi Delta Attention in place of latent attention in most layers."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields
from models.config.fields import (
    read_count,
    read_layer_numbers,
    refuse_other_values,
    with_defaults,
    with_main_names,
)
from models.config.latent_config import LatentAttentionConfig, read_latent_attention
from models.config.moe_config import (
    read_corrected_choice,
    read_expert_fields,
    read_leading_dense,
    read_mlp_layer_types,
)
from models.config.rope_config import RopeConfig
from models.config.state_layers import read_has_state
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.layers.kimi_delta_attention import DELTA_ATTENTION, KimiDeltaAttention, KimiDeltaConfig
from models.layers.latent_attention import LatentAttention
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import SelfAttention
from models.layers.sparse_mlp import renamed_experts
from models.weight_rule import WeightRule

# Names of fields on the hub and in transformers -> names here.
MAIN_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "bos_token_id": 163_584,
    "eos_token_id": 163_586,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
}
_SUPPORTED = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "rope_scaling": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig(CorrectedMoEConfig):
    """The config of Kimi Linear. Layers without attention have a `KimiDeltaAttention`."""

    linear: KimiDeltaConfig

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, DELTA_ATTENTION, self.linear.format())


class KimiLinearForCausalLM(MoEDecoder):
    """Source: arXiv:2510.26692."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> KimiLinearConfig:
        hf_config = with_defaults(with_main_names(hf_config, MAIN_NAMES), _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config, default_num_experts=256, default_top_k=8, default_size=1024
        )
        num_layers = fields["num_layers"]
        attention = _read_attention(hf_config, fields["max_position_embeddings"])
        num_shared = read_count(hf_config, "n_shared_experts", 1)
        leading_dense = read_leading_dense(hf_config, num_layers, default=1)
        return KimiLinearConfig(
            **fields,
            **experts,
            attention=tuple(
                None if has_state else attention for has_state in _read_has_state(hf_config)
            ),
            has_experts=read_mlp_layer_types(hf_config, leading_dense),
            choose=read_corrected_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
            linear=_read_linear(hf_config, fields["rms_norm_eps"]),
        )

    def __init__(
        self, config: KimiLinearConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return KimiDeltaAttention(config.linear, dtype=dtype)
            return LatentAttention(attention, dtype=dtype)

        super().__init__(
            config,
            attention=make_mixer,
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have Mixtral's names for the projections of experts."""
        return renamed_experts(super().weight_rules())

    def name_weight(self, name: str) -> str:
        """Layers call their MLP or experts `mlp`. On the hub, the two have different names."""
        return name.replace(".block_sparse_moe.", ".mlp.")


def _read_attention(
    hf_config: Mapping[str, object], max_position_embeddings: int
) -> LatentAttentionConfig:
    attention = read_latent_attention(hf_config, max_position_embeddings, default_q_latent_dim=None)
    return replace(
        attention,
        rope=RopeConfig(),
        has_positions=False,
        rotary_dim=None,
        unturned_dim=attention.rope_dim,
    )


def _read_has_state(hf_config: Mapping[str, object]) -> tuple[bool, ...]:
    """For each layer, whether it has a state: from `layer_types`, or from the hub's fields."""
    num_layers = read_count(hf_config, "num_hidden_layers")
    by_rule = [layer_idx == 0 or layer_idx % 4 != 0 for layer_idx in range(num_layers)]
    written = _hub_fields(hf_config)
    # The hub counts layers from 1.
    full = read_layer_numbers(written, "full_attn_layers")
    if full is not None and written.get("kda_layers") is not None:
        by_rule = [layer_idx + 1 not in full for layer_idx in range(num_layers)]
    return read_has_state(hf_config, by_rule, "linear_attention")


def _read_linear(hf_config: Mapping[str, object], eps: float) -> KimiDeltaConfig:
    written = _hub_fields(hf_config)

    def read(hub_name: str, name: str, default: int) -> int:
        return read_count(written, hub_name, read_count(hf_config, name, default))

    return KimiDeltaConfig(
        hidden_size=read_count(hf_config, "hidden_size"),
        num_heads=read("num_heads", "linear_num_heads", 32),
        head_dim=read("head_dim", "linear_head_dim", 128),
        kernel_size=read("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        eps=eps,
    )


def _hub_fields(hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """The fields in `linear_attn_config`, which config.json has on the hub."""
    fields = hf_config.get("linear_attn_config")
    return fields if isinstance(fields, Mapping) else {}
