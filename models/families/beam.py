"""Beam 1: attention with a gate, norms on both sides of each part, and scaled residuals."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_flag
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import (
    MoEConfig,
    read_corrected_choice,
    read_expert_fields,
    read_mlp_layer_types,
)
from models.config.rope_config import parse_ropes_by_layer_type
from models.decoders.moe_decoder import MoEDecoder
from models.families.gemma2 import read_logits_soft_cap
from models.forward.kernel_settings import KernelSettings
from models.layers.beam_layers import (
    BeamAttention,
    BeamExperts,
    BeamLayer,
    BeamMLP,
)
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RoundedLastRMSNorm
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.soft_cap import soft_cap_logits
from models.layers.sparse_mlp import SparseMLP

_DEFAULT_ROPES = {"sliding_attention": {"rope_theta": 10_000.0}, "full_attention": None}
# Numbers of the choice of experts that a config.json may leave out.
_DEFAULTS = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamConfig(MoEConfig):
    """The config of Beam."""

    choose: SigmoidTopK
    logits_soft_cap: float | None


class BeamForCausalLM(MoEDecoder):
    """By default, the last layer and every sixth are full and have no positions.

    Source: huggingface.co/reflection/Beam-1.0-501B-A23B.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> BeamConfig:
        hf_config = {"rope_parameters": None, **hf_config}
        if hf_config["rope_parameters"] is None:
            hf_config["rope_parameters"] = _DEFAULT_ROPES
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config, default_num_experts=256, default_top_k=8, default_size=2560
        )
        num_layers = fields["num_layers"]
        return BeamConfig(
            **fields,
            **experts,
            attention=_read_attention(hf_config, fields["max_position_embeddings"], num_layers),
            has_experts=read_mlp_layer_types(hf_config, [idx >= 3 for idx in range(num_layers)]),
            choose=read_corrected_choice({**_DEFAULTS, **hf_config}, experts),
            logits_soft_cap=read_logits_soft_cap({"final_logit_softcapping": 30.0, **hf_config}),
        )

    def __init__(self, config: BeamConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RoundedLastRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layer=BeamLayer,
            attention=functools.partial(
                make_head_normed_attention, norm=norm, attention=BeamAttention, dtype=dtype
            ),
            mlp=BeamMLP,
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return soft_cap_logits(super().compute_logits(hidden, kernels), self.config.logits_soft_cap)


def _read_attention(
    hf_config: Mapping[str, object], max_positions: int, num_layers: int
) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each layer. Layer types whose rope is null have no positions."""
    written = hf_config.get("layer_types")
    types = {"full_attention", "sliding_attention"}
    types &= set(written) if isinstance(written, list) else types
    ropes = hf_config["rope_parameters"]
    turned = {name for name in types if isinstance(ropes, Mapping) and ropes.get(name) is not None}
    rope, sliding_rope = parse_ropes_by_layer_type(hf_config, max_positions, required_types=turned)
    has_bias = read_flag(hf_config, "attention_bias")
    full = AttentionConfig(
        **read_head_fields(hf_config, default_num_kv_heads=8, default_head_dim=128),
        rope=rope,
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_positions="full_attention" in turned,
    )
    return attention_by_type(
        hf_config,
        [(idx + 1) % 6 != 0 and idx != num_layers - 1 for idx in range(num_layers)],
        full=full,
        sliding=dataclasses.replace(
            full, rope=sliding_rope, has_positions="sliding_attention" in turned
        ),
        window=read_sliding_window(hf_config, default=512),
        max_position_embeddings=max_positions,
    )


def _make_sparse_mlp(config: BeamConfig, dtype: jnp.dtype) -> SparseMLP:
    return SparseMLP(
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=config.choose,
        experts=BeamExperts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        ),
    )
