"""Flint: attention sinks, full layers without positions, and experts chosen by sigmoids."""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_count, read_flag
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import read_expert_fields, read_sparse_steps
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import SharedMoEConfig, make_shared_experts
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router
from models.layers.routing_rules import SigmoidOfTopK
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import WeightRule, with_renamed_sources


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlintConfig(SharedMoEConfig):
    """The config of Flint."""

    choose: SigmoidOfTopK


class FlintForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/flint."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> FlintConfig:
        if hf_config.get("mlp_only_layers") is None:
            hf_config = {**hf_config, "mlp_only_layers": [0, 1]}
        fields = read_dense_fields(hf_config)
        num_layers = fields["num_layers"]
        sliding = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=4,
            default_head_dim=128,
        )
        sliding = dataclasses.replace(sliding, has_sinks=True)
        experts = read_expert_fields(
            hf_config, default_num_experts=256, default_top_k=6, default_size=512
        )
        return FlintConfig(
            **fields,
            **experts,
            attention=attention_by_type(
                hf_config,
                [_is_sliding(layer_idx, num_layers) for layer_idx in range(num_layers)],
                full=dataclasses.replace(sliding, has_positions=False),
                sliding=sliding,
                window=read_sliding_window(hf_config, default=513),
                max_position_embeddings=fields["max_position_embeddings"],
            ),
            has_experts=read_sparse_steps(hf_config, num_layers),
            choose=SigmoidOfTopK(
                top_k=experts["num_experts_per_tok"],
                normalizes=read_flag(hf_config, "norm_topk_prob", True),
            ),
            shared_intermediate_size=read_count(hf_config, "shared_expert_intermediate_size", 1024),
        )

    def __init__(self, config: FlintConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for sinks and for the shared expert."""

        def rename(name: str) -> str:
            name = name.replace(".self_attn.sinks", ".self_attn.softmax_offset")
            return name.replace(".shared_experts.", ".shared_expert.")

        return with_renamed_sources(super().weight_rules(), rename)


def _is_sliding(layer_idx: int, num_layers: int) -> bool:
    """The first two layers, every fourth layer and the last layer are full by default."""
    return layer_idx >= 2 and layer_idx % 4 != 1 and layer_idx != num_layers - 1


def _make_sparse_mlp(config: FlintConfig, dtype: jnp.dtype) -> SparseMLP:
    gate = Router(config.hidden_size, config.num_experts, dtype=jnp.dtype("float32"))
    return make_shared_experts(config, gate=gate, choose=config.choose, dtype=dtype)
