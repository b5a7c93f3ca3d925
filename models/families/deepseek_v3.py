"""DeepSeek V3, DeepSeek R1 and Kimi K2: latent attention, which caches one vector per token for all
heads, and experts chosen in groups. The layer for multi-token prediction makes
drafts with the method `mtp`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, refuse_other_values, with_defaults
from models.config.latent_config import read_latent_attention, read_turns_neighbors
from models.config.moe_config import read_corrected_choice, read_expert_fields, read_leading_dense
from models.config.mtp_layers import is_of_mtp_layer, read_num_mtp_layers
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.layer_loop import Layer
from models.decoders.moe_decoder import MoEDecoder
from models.layers.decoder_layers import PreNormLayer
from models.layers.latent_attention import LatentAttention
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import SelfAttention
from models.layers.sparse_mlp import SparseMLP

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_SUPPORTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config(CorrectedMoEConfig):
    """The config of DeepSeek V3."""

    num_mtp_layers: int


class DeepseekV3ForCausalLM(MoEDecoder):
    """Source: arXiv:2412.19437."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DeepseekV3Config:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_num_experts=256,
            default_top_k=8,
            default_size=2048,
        )
        attention = read_latent_attention(
            hf_config,
            fields["max_position_embeddings"],
            default_q_latent_dim=1536,
            turns_neighbors=read_turns_neighbors(hf_config),
        )
        num_shared = read_count(hf_config, "n_shared_experts", 1)
        return DeepseekV3Config(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=read_leading_dense(hf_config, fields["num_layers"], default=3),
            choose=read_corrected_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
            num_mtp_layers=read_num_mtp_layers(hf_config, default=1),
        )

    def __init__(
        self,
        config: DeepseekV3Config,
        *,
        layer: Callable[..., Layer] = PreNormLayer,
        make_attention: Callable[..., SelfAttention] = LatentAttention,
        make_experts: Callable[..., SparseMLP] = make_corrected_experts,
        has_head_kernel: bool,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the model with weights to be filled in.

        Args:
            layer: As in `make_moe_layers`.
            make_attention: Makes the attention of one layer. It takes the arguments of
                `LatentAttention`.
            make_experts: Makes the experts of one layer. It takes the arguments of
                `make_corrected_experts`.
        """
        super().__init__(
            config,
            layer=layer,
            attention=functools.partial(make_attention, dtype=dtype),
            sparse_mlp=functools.partial(make_experts, config, dtype=dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def ignores_weight(self, name: str) -> bool:
        return is_of_mtp_layer(
            name, num_layers=self.config.num_layers, num_mtp_layers=self.config.num_mtp_layers
        )
