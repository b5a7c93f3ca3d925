"""Muse Spark, its language model: Muse Glimmer with normed heads, gates of the residual stream, and
experts that are narrower than the hidden size.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, read_number, refuse_other_values, with_defaults
from models.config.moe_config import MoEConfig, read_expert_fields, read_mlp_layer_types
from models.config.rope_config import with_default_rope
from models.decoders.moe_decoder import make_moe_layers
from models.families.muse_glimmer import (
    MUSE_DEFAULTS,
    MuseDecoder,
    read_muse_attention,
    read_muse_numbers,
)
from models.layers.experts import packed_gate_up_rules
from models.layers.linear import Linear
from models.layers.muse_layers import (
    GatedResidualLayer,
    InputScaledRMSNorm,
    NormedGatedAttention,
    ResidualGate,
)
from models.layers.narrow_sparse_mlp import NarrowSparseMLP, NormedExperts, ScaledSigmoidTopK
from models.layers.rms_norm import OffsetRMSNorm, UnscaledRMSNorm
from models.layers.routing import CorrectedRouter
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = MUSE_DEFAULTS | {
    "num_key_value_heads": 16,
    "head_dim": 64,
    "qk_scale_factor": 5.4730064863875,
    "output_multiplier": 0.1767766952966369,
}
# transformers does not tie the head, even if config.json says so.
_SUPPORTED = {"tie_word_embeddings": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MuseSparkConfig(MoEConfig):
    """The config of Muse Spark."""

    post_norm_eps: float  # of the norms of outputs
    logits_scale: float  # factor of logits, and of the router's scores
    logits_soft_cap: float
    choose: ScaledSigmoidTopK
    expert_hidden_size: int  # features that experts read and write
    gate_temperature: float  # of the gates of the residual stream


class MuseSparkForCausalLM(MuseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/muse_spark."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MuseSparkConfig:
        refuse_other_values(hf_config, _SUPPORTED)
        hf_config = with_default_rope(hf_config, {"rope_theta": 500_000.0})
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        numbers = read_muse_numbers(hf_config)
        experts = read_expert_fields(
            hf_config, default_num_experts=256, default_top_k=8, default_size=4096
        )
        return MuseSparkConfig(
            **fields,
            **numbers,
            **experts,
            attention=read_muse_attention(hf_config, fields),
            has_experts=read_mlp_layer_types(hf_config, (True,) * fields["num_layers"]),
            choose=ScaledSigmoidTopK(
                top_k=experts["num_experts_per_tok"],
                factor=read_number(hf_config, "routed_scaling_factor", 1.0),
                score_scale=numbers["logits_scale"],
            ),
            expert_hidden_size=read_count(hf_config, "moe_hidden_size", 4096),
            gate_temperature=read_number(hf_config, "residual_gate_temperature", 0.3),
        )

    def __init__(self, config: MuseSparkConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        hidden_size, eps = config.hidden_size, config.post_norm_eps
        layers = make_moe_layers(
            config,
            layer=functools.partial(
                GatedResidualLayer,
                attention_out_norm=functools.partial(UnscaledRMSNorm, eps=eps),
                mlp_out_norm=functools.partial(
                    InputScaledRMSNorm, hidden_size, eps=eps, dtype=dtype
                ),
                residual_gate=functools.partial(
                    ResidualGate, hidden_size, temperature=config.gate_temperature
                ),
            ),
            attention=functools.partial(_make_attention, eps=config.rms_norm_eps, dtype=dtype),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            dtype=dtype,
        )
        super().__init__(config, layers=layers, has_head_kernel=has_head_kernel, dtype=dtype)

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join all experts of a layer, as [num_experts, out, in]."""
        return packed_gate_up_rules(super().weight_rules())


def _make_attention(
    attention: AttentionConfig, *, eps: float, dtype: jnp.dtype
) -> NormedGatedAttention:
    q_norm, k_norm, o_norm = (UnscaledRMSNorm(eps=eps) for _ in range(3))
    return NormedGatedAttention(
        attention, gate=jax.nn.sigmoid, q_norm=q_norm, k_norm=k_norm, o_norm=o_norm, dtype=dtype
    )


def _make_sparse_mlp(config: MuseSparkConfig, dtype: jnp.dtype) -> NarrowSparseMLP:
    wide, narrow = config.hidden_size, config.expert_hidden_size
    linear = functools.partial(Linear, axes=("inner", None), dtype=dtype)
    return NarrowSparseMLP(
        gate=CorrectedRouter(wide, config.num_experts),
        choose=config.choose,
        pre_expert_proj=linear(wide, narrow),
        pre_expert_norm=OffsetRMSNorm(narrow, eps=config.rms_norm_eps, dtype=dtype),
        experts=NormedExperts(
            *(config.num_experts, narrow, config.moe_intermediate_size),
            activation=config.hidden_act,
            norm=InputScaledRMSNorm(narrow, eps=config.post_norm_eps, dtype=dtype),
            dtype=dtype,
        ),
        post_expert_proj=linear(narrow, wide),
    )
