"""Hunyuan-A13B: Hunyuan's attention, and experts with a shared MLP in every layer."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, refuse_other_values, with_defaults
from models.config.moe_config import read_expert_fields
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import SharedMoEConfig, make_shared_experts
from models.errors import UnsupportedModelError
from models.families.hunyuan_v1_dense import hunyuan_name, parse_hunyuan_rope
from models.layers.attention_variants import NormedLastAttention
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
# The hub's config.json has these; transformers computes these values, whatever they say.
_SUPPORTED = {
    "use_qk_norm": True,
    "use_cla": False,
    "mlp_bias": False,
    "use_mixed_mlp_moe": True,
    "moe_layer_num_skipped": 0,
    "norm_type": "rms",
}


class HunYuanMoEV1ForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/hunyuan_v1_moe."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> SharedMoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        size = fields["intermediate_size"]
        num_shared = _read_for_all_layers(hf_config, "num_shared_expert", 1)
        experts = read_expert_fields(
            {
                "num_experts": hf_config.get("num_experts"),
                "num_experts_per_tok": _read_for_all_layers(hf_config, "moe_topk", 1),
                "size": _read_for_all_layers(hf_config, "moe_intermediate_size", size),
            },
            default_num_experts=1,
            default_top_k=1,
            size_field="size",
        )
        return SharedMoEConfig(
            **fields,
            **experts,
            attention=(_read_attention(hf_config, fields["max_position_embeddings"]),)
            * fields["num_layers"],
            has_experts=(True,) * fields["num_layers"],
            shared_intermediate_size=num_shared * size,
        )

    def __init__(self, config: SharedMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(
                make_head_normed_attention, norm=norm, attention=NormedLastAttention, dtype=dtype
            ),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for the norms of heads, the router and the shared MLP."""

        def rename(name: str) -> str:
            name = name.replace(".mlp.gate.", ".mlp.gate.wg.")
            return hunyuan_name(name.replace(".shared_experts.", ".shared_mlp."))

        return with_renamed_sources(super().weight_rules(), rename)


def _read_attention(hf_config: Mapping[str, object], max_positions: int) -> AttentionConfig:
    has_bias = read_flag(hf_config, "attention_bias")
    # The hub calls the size of a head attention_head_dim.
    head_dim = hf_config.get("head_dim") or hf_config.get("attention_head_dim")
    head_fields = read_head_fields({**hf_config, "head_dim": head_dim})
    return AttentionConfig(
        **head_fields,
        rope=parse_hunyuan_rope(hf_config, max_positions, head_dim=head_fields["head_dim"]),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _read_for_all_layers(hf_config: Mapping[str, object], name: str, default: int) -> int:
    """Reads a count that may be a list with one value per layer.

    Raises:
        UnsupportedModelError: The layers have different values.
    """
    value = hf_config.get(name)
    if not isinstance(value, list) or not value:
        return read_count(hf_config, name, default)
    if len(set(map(str, value))) > 1:
        raise UnsupportedModelError(
            f"config.json: {name} is {value}; layers with different values are not supported. "
            "All values must be equal."
        )
    return read_count({name: value[0]}, name)


def _make_sparse_mlp(config: SharedMoEConfig, dtype: jnp.dtype) -> SparseMLP:
    return make_shared_experts(
        config,
        gate=Router(config.hidden_size, config.num_experts, dtype=jnp.dtype("float32")),
        choose=SoftmaxTopK(top_k=config.num_experts_per_tok, normalizes=True),
        dtype=dtype,
    )
