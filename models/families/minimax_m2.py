"""MiniMax-M2: norms of all heads together, partial rotary embeddings, and experts in every layer.
The published weights are FP8.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, refuse_other_values, with_defaults
from models.config.moe_config import MoEConfig, read_expert_fields
from models.config.partial_rotary import parse_partial_rope
from models.decoders.moe_decoder import MoEDecoder
from models.layers.dense_layers import make_joint_normed_attention
from models.layers.experts import make_experts
from models.layers.rms_norm import JoinedHeadsRMSNorm, RMSNorm
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.sparse_mlp import SparseMLP, block_sparse_moe_rules
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rope_theta": 5e6, "bos_token_id": 200034, "eos_token_id": 200020}
# Fields that only the config.json on the hub has, with the values that this code supports.
# transformers computes the same for all values.
_SUPPORTED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "sliding_window": None,
}


class MiniMaxM2ForCausalLM(MoEDecoder):
    """Llama's layers with normed queries and keys, and experts in place of the MLP.

    Source: huggingface.co/MiniMaxAI/MiniMax-M2.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        # 1 is full attention; 0 would be the linear attention of MiniMax-Text-01.
        attention_types = {"attn_type_list": [1] * fields["num_layers"]}
        refuse_other_values(hf_config, _SUPPORTED | attention_types)
        experts = read_expert_fields(
            hf_config,
            default_num_experts=256,
            default_top_k=8,
            size_field="intermediate_size",
        )
        attention = _read_attention(hf_config, fields["max_position_embeddings"])
        return MoEConfig(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=(True,) * fields["num_layers"],
        )

    def __init__(self, config: MoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        head_norm = functools.partial(JoinedHeadsRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_joint_normed_attention, norm=head_norm, dtype=dtype),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints have Mixtral's names.

        They store the router's correction under the name of the whole block.
        """

        def rename(name: str) -> str:
            return name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")

        return with_renamed_sources(block_sparse_moe_rules(super().weight_rules()), rename)


def _read_attention(hf_config: Mapping[str, object], max_positions: int) -> AttentionConfig:
    head_fields = read_head_fields(hf_config, default_num_kv_heads=8, default_head_dim=128)
    head_dim = head_fields["head_dim"]
    # The config.json on the hub has the number of rotated dimensions, and transformers 5 their
    # share.
    share = read_count(hf_config, "rotary_dim", head_dim) / head_dim
    rope, factor = parse_partial_rope(hf_config, max_positions, default_factor=share)
    return AttentionConfig(**head_fields, rope=rope, rotary_dim=int(head_dim * factor))


def _make_sparse_mlp(config: MoEConfig, dtype: jnp.dtype) -> SparseMLP:
    return SparseMLP(
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=SigmoidTopK(top_k=config.num_experts_per_tok),
        experts=make_experts(config, dtype=dtype),
    )
