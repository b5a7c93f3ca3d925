"""Trinity (AFM-MoE): gated attention, four norms per layer, and experts in most layers."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_count, read_flag, read_number, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import read_expert_fields
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.layers.decoder_layers import SandwichNormLayer
from models.layers.dense_layers import make_head_normed_attention
from models.layers.gated_attention import GatedAttention
from models.layers.rms_norm import RoundedLastRMSNorm
from models.layers.routing import SigmoidTopK
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AfmoeConfig(CorrectedMoEConfig):
    """The config of AFM-MoE."""

    embedding_scale: float  # factor of token embeddings


class AfmoeForCausalLM(MoEDecoder):
    """Full layers have no positions. By default, every fourth layer is full.

    Source: huggingface.co/docs/transformers/model_doc/afmoe.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> AfmoeConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        num_layers = fields["num_layers"]
        sliding = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_head_dim=128,
        )
        interval = read_count(hf_config, "global_attn_every_n_layers", 4)
        experts = read_expert_fields(
            hf_config, default_num_experts=64, default_top_k=6, default_size=1408
        )
        num_dense = read_count(hf_config, "num_dense_layers", 1, minimum=0)
        num_shared = read_count(hf_config, "num_shared_experts", 2)
        return AfmoeConfig(
            **fields,
            **experts,
            attention=attention_by_type(
                hf_config,
                [(layer_idx + 1) % interval != 0 for layer_idx in range(num_layers)],
                full=dataclasses.replace(sliding, has_positions=False),
                sliding=sliding,
                window=read_sliding_window(hf_config, default=1024),
                max_position_embeddings=fields["max_position_embeddings"],
            ),
            has_experts=tuple(layer_idx >= num_dense for layer_idx in range(num_layers)),
            choose=SigmoidTopK(
                top_k=experts["num_experts_per_tok"],
                factor=read_number(hf_config, "route_scale", 1.0),
            ),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
            embedding_scale=(
                fields["hidden_size"] ** 0.5 if read_flag(hf_config, "mup_enabled") else 1.0
            ),
        )

    def __init__(self, config: AfmoeConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RoundedLastRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layer=SandwichNormLayer,
            attention=functools.partial(
                make_head_normed_attention,
                norm=norm,
                attention=functools.partial(GatedAttention, gate=jax.nn.sigmoid),
                dtype=dtype,
            ),
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=norm,
            embedding_scale=config.embedding_scale,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for norms, for the router and for its corrections."""

        def rename(name: str) -> str:
            name = name.replace("_feedforward_layernorm", "_mlp_layernorm")
            name = name.replace(".mlp.gate.e_score_correction_bias", ".mlp.expert_bias")
            return name.replace(".mlp.gate.", ".mlp.router.gate.")

        return with_renamed_sources(super().weight_rules(), rename)
