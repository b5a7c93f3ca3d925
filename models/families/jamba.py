"""Jamba: Mamba in most layers, attention without positions in a few, and experts in every other."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, with_defaults
from models.config.moe_config import MoEConfig, read_expert_fields
from models.config.rope_config import RopeConfig
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.moe_decoder import MoEDecoder
from models.errors import ModelConfigError
from models.layers.attention import Attention
from models.layers.experts import make_experts
from models.layers.mamba import Mamba, MambaConfig, read_time_step_rank
from models.layers.mamba2 import MAMBA
from models.layers.mixer_rules import with_renamed_mixers
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.self_attention import SelfAttention
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "max_position_embeddings": 262_144,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    ".mlp.gate.": ".mlp.router.",
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaConfig(MoEConfig):
    """The config of Jamba. Layers without attention have a `Mamba`."""

    mamba: MambaConfig

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, MAMBA, self.mamba.format())


class JambaForCausalLM(MoEDecoder):
    """With one expert (Jamba 2 3B), all layers have an MLP.

    Source: arXiv:2403.19887.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> JambaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        num_layers = fields["num_layers"]
        has_experts = read_count(hf_config, "num_experts", 16) > 1
        if not has_experts:
            hf_config = hf_config | {"num_experts_per_tok": 1}
        experts = read_expert_fields(
            hf_config, default_num_experts=16, default_top_k=2, size_field="intermediate_size"
        )
        heads = read_head_fields(hf_config, default_num_kv_heads=8)
        attention = AttentionConfig(**heads, rope=RopeConfig(), has_positions=False)
        is_attention = _read_period(hf_config, "attn_layer", num_layers, period=8, offset=4)
        is_sparse = _read_period(hf_config, "expert_layer", num_layers, period=2, offset=1)
        return JambaConfig(
            **fields,
            **experts,
            attention=tuple(attention if is_own else None for is_own in is_attention),
            has_experts=tuple(has_experts and is_own for is_own in is_sparse),
            mamba=MambaConfig(
                hidden_size=fields["hidden_size"],
                inner=read_count(hf_config, "mamba_expand", 2) * fields["hidden_size"],
                state_size=read_count(hf_config, "mamba_d_state", 16),
                time_step_rank=read_time_step_rank(hf_config, "mamba_dt_rank"),
                kernel_size=read_count(hf_config, "mamba_d_conv", 4),
                use_bias=read_flag(hf_config, "mamba_proj_bias"),
                use_conv_bias=read_flag(hf_config, "mamba_conv_bias", True),
            ),
        )

    def __init__(self, config: JambaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)

        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return Mamba(config.mamba, norm=norm, dtype=dtype)
            return Attention(attention, dtype=dtype)

        super().__init__(
            config,
            attention=make_mixer,
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for mixers, MLPs and norms."""
        rules = with_stored_names(super().weight_rules(), _STORED_NAMES)
        return with_renamed_mixers(rules, self.config.attention, MAMBA)


def _make_sparse_mlp(config: JambaConfig, dtype: jnp.dtype) -> SparseMLP:
    return SparseMLP(
        gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
        choose=SoftmaxTopK(top_k=config.num_experts_per_tok, normalizes=False),
        experts=make_experts(config, dtype=dtype),
    )


def _read_period(
    hf_config: Mapping[str, object], name: str, num_layers: int, *, period: int, offset: int
) -> list[bool]:
    """For each layer, whether its index modulo `<name>_period` is `<name>_offset`."""
    period = read_count(hf_config, f"{name}_period", period)
    offset = read_count(hf_config, f"{name}_offset", offset, minimum=0)
    if offset >= period:
        raise ModelConfigError(
            f"config.json: {name}_offset is {offset}; expected less than {name}_period, {period}."
        )
    return [layer_idx % period == offset for layer_idx in range(num_layers)]
