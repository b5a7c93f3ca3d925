"""Granite 3 with experts, PowerMoE: Granite's factors, and experts in every layer.

Releases with experts and a shared MLP have an architecture of their own.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, with_defaults
from models.config.moe_config import read_expert_fields
from models.config.rope_config import parse_rope_config
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import SharedMoEConfig, make_shared_experts
from models.families.granite import read_granite_factors, read_granite_head_fields
from models.forward.kernel_settings import KernelSettings
from models.layers.experts import packed_gate_up_rules
from models.layers.packed_weights import with_packed_gate_up
from models.layers.residual_layers import ScaledPreNormLayer
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeConfig(SharedMoEConfig):
    """The config of Granite with experts."""

    embedding_scale: float  # factor of token embeddings
    residual_scale: float  # factor of the outputs of attention and of the experts
    logits_scale: float  # factor of logits


class GraniteMoeForCausalLM(MoEDecoder):
    """Source: arXiv:2408.13359."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GraniteMoeConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_granite_moe_fields(hf_config)
        attention = AttentionConfig(
            **read_granite_head_fields(hf_config),
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
        )
        return GraniteMoeConfig(
            **fields, attention=(attention,) * fields["num_layers"], shared_intermediate_size=0
        )

    def __init__(
        self, config: GraniteMoeConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            layer=functools.partial(ScaledPreNormLayer, residual_scale=config.residual_scale),
            sparse_mlp=functools.partial(make_granite_experts, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            embedding_scale=config.embedding_scale,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden, kernels) * self.config.logits_scale

    # Names of modules here, and in checkpoints.
    stored_names: ClassVar[Mapping[str, str]] = {
        ".mlp.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
        ".mlp.experts.down_proj": ".block_sparse_moe.output_linear.weight",
        ".mlp.gate.": ".block_sparse_moe.router.layer.",
        ".mlp.shared_experts.down_proj.": ".shared_mlp.output_linear.",
        ".mlp.shared_experts.": ".shared_mlp.",
    }

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join gate and up, and all experts of a layer."""
        rules = packed_gate_up_rules(super().weight_rules())
        if self.config.shared_intermediate_size:
            rules = with_packed_gate_up(
                rules,
                num_layers=self.config.num_layers,
                intermediate_size=self.config.shared_intermediate_size,
                mlp="mlp.shared_experts",
                packed="input_linear",
            )
        return with_stored_names(rules, self.stored_names)


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite with experts and a shared MLP."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GraniteMoeConfig:
        return dataclasses.replace(
            super().read_config(hf_config), shared_intermediate_size=read_shared_size(hf_config)
        )


def read_granite_moe_fields(hf_config: Mapping[str, object]) -> dict[str, object]:
    """Reads the fields of `GraniteMoeConfig` except `attention` and the shared MLP."""
    fields = read_dense_fields(hf_config)
    experts = read_expert_fields(
        hf_config,
        num_experts_fields=("num_local_experts",),
        default_num_experts=8,
        default_top_k=2,
        size_field="intermediate_size",
    )
    has_experts = (True,) * fields["num_layers"]
    return fields | experts | read_granite_factors(hf_config) | {"has_experts": has_experts}


def read_shared_size(hf_config: Mapping[str, object]) -> int:
    """Reads the inner width of the shared MLP; 0 if there is none."""
    return read_count(hf_config, "shared_intermediate_size", 0, minimum=0)


def make_granite_experts(config: GraniteMoeConfig, dtype: jnp.dtype) -> SparseMLP:
    """Makes the experts of one layer, with the shared MLP if there is one."""
    return make_shared_experts(
        config,
        gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
        choose=SoftmaxTopK(top_k=config.num_experts_per_tok, normalizes=True),
        dtype=dtype,
    )
