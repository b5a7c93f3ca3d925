"""Step 3.5 Flash, and Step 3.7 Flash's language model: gated attention, more heads in sliding
layers, experts with a shared expert in most layers, and a clipped SwiGLU in the last ones.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, read_number, refuse_other_values, with_defaults
from models.config.layer_overrides import without_layer_overrides
from models.config.moe_config import read_expert_fields
from models.config.mtp_layers import is_of_mtp_layer, read_num_mtp_layers
from models.config.step3p5_attention import read_step_attention
from models.config.step3p5_fields import read_has_experts, read_limits, with_new_names
from models.decoders.corrected_moe import CorrectedMoEConfig
from models.decoders.decoder import Decoder
from models.layers.clipped_swiglu import ClippedExperts, ClippedGatedMLP
from models.layers.decoder_layers import PreNormLayer
from models.layers.dense_layers import make_head_normed_attention
from models.layers.experts import Experts
from models.layers.gated_attention import GatedAttention
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import OffsetRMSNorm
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.sparse_mlp import SharedExpertsMLP
from models.layers.stacked_experts import with_source
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5}
_SUPPORTED = {
    "gating": True,
    "hidden_act": "silu",
    "mlp_bias": False,
    # Only the config.json on the hub has these.
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "sink": False,
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "use_rope_layers": [],
    "yarn_only_types": ["full_attention"],
    "zero_centered": True,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step3p5Config(CorrectedMoEConfig):
    """The config of Step 3.5. Limits are of each layer; None: the layer does not clip."""

    expert_limits: tuple[float | None, ...]
    mlp_limits: tuple[float | None, ...]  # of the MLP or the shared expert
    num_mtp_layers: int


class Step3p5ForCausalLM(Decoder):
    """Source: huggingface.co/stepfun-ai/Step-3.5-Flash."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Step3p5Config:
        hf_config = with_new_names(with_defaults(hf_config, _DEFAULTS))
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(without_layer_overrides(hf_config))
        num_layers = fields["num_layers"]
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts",),
            default_num_experts=288,
            default_top_k=8,
            default_size=1280,
        )
        return Step3p5Config(
            **fields,
            **experts,
            attention=read_step_attention(hf_config, num_layers, fields["max_position_embeddings"]),
            has_experts=read_has_experts(hf_config, num_layers),
            choose=SigmoidTopK(
                top_k=experts["num_experts_per_tok"],
                factor=read_number(hf_config, "moe_router_scaling_factor", 1.0),
            ),
            shared_intermediate_size=read_count(hf_config, "share_expert_dim", 1280),
            expert_limits=read_limits(hf_config, "swiglu_limits", num_layers),
            mlp_limits=read_limits(hf_config, "swiglu_limits_shared", num_layers),
            num_mtp_layers=read_num_mtp_layers(hf_config, default=0),
        )

    def __init__(self, config: Step3p5Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention = functools.partial(GatedAttention, gate=jax.nn.sigmoid, is_per_head=True)
        layers = [
            PreNormLayer(
                attention=make_head_normed_attention(
                    of_layer, norm=norm, attention=attention, dtype=dtype
                ),
                mlp=_make_mlp(config, layer_idx, dtype),
                norm=functools.partial(norm, config.hidden_size),
            )
            for layer_idx, of_layer in enumerate(config.attention)
        ]
        super().__init__(
            config,
            layers=layers,
            norm=norm(config.hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names, and one tensor for each projection of all experts."""
        rules = {
            name: _stacked(rule) if rule.layout == "experts" else rule
            for name, rule in super().weight_rules().items()
        }

        def rename(name: str) -> str:
            name = name.replace(".self_attn.gate_proj.", ".self_attn.g_proj.")
            name = name.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
            name = name.replace(".mlp.gate.", ".moe.gate.")
            return name.replace(".mlp.shared_experts.", ".share_expert.")

        return with_renamed_sources(rules, rename)

    def ignores_weight(self, name: str) -> bool:
        return is_of_mtp_layer(
            name, num_layers=self.config.num_layers, num_mtp_layers=self.config.num_mtp_layers
        )


def _make_mlp(
    config: Step3p5Config, layer_idx: int, dtype: jnp.dtype
) -> GatedMLP | SharedExpertsMLP:
    limit, mlp_limit = config.expert_limits[layer_idx], config.mlp_limits[layer_idx]
    has_experts = config.has_experts[layer_idx]
    mlp = functools.partial(ClippedGatedMLP, limit=mlp_limit) if mlp_limit else GatedMLP
    dense = mlp(
        config.hidden_size,
        config.shared_intermediate_size if has_experts else config.intermediate_size,
        activation=config.hidden_act,
        dtype=dtype,
    )
    if not has_experts:
        return dense
    experts = functools.partial(ClippedExperts, limit=limit) if limit else Experts
    return SharedExpertsMLP(
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=config.choose,
        experts=experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        ),
        shared_experts=dense,
    )


def _stacked(rule: WeightRule) -> WeightRule:
    # "model.layers.3.mlp.experts.0.gate_proj.weight" -> "model.layers.3.moe.gate_proj.weight"
    name = rule.sources[0].name.replace(".mlp.experts.0.", ".moe.")
    return with_source(rule, name, (len(rule.sources), *rule.sources[0].shape))
