"""Command A with experts: Command R7B's attention, in parallel to experts."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_count, read_flag, read_number, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import (
    read_expert_fields,
    read_leading_dense,
    read_mlp_layer_types,
)
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import SharedMoEConfig, make_shared_experts
from models.errors import UnsupportedModelError
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.decoder_layers import ParallelLayer
from models.layers.layer_norm import UnbiasedLayerNorm
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm
from models.layers.rotary import apply_rotary_to_neighbors
from models.layers.routing import Router, SoftmaxTopK
from models.layers.routing_rules import SigmoidOfTopK
from models.layers.sparse_mlp import SharedExpertsMLP, SparseMLP

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 5, "eos_token_id": 255_001}
_Combination = Literal["average", "sum"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cohere2MoeConfig(SharedMoEConfig):
    """The config of Command A with experts. `rms_norm_eps` is the norms' eps of either kind."""

    has_rms_norms: bool  # otherwise layer norms
    logits_scale: float  # factor of logits
    dense_intermediate_size: int  # of the MLPs in layers without experts
    combination: _Combination  # of the outputs of experts and shared experts
    choose: SoftmaxTopK | SigmoidOfTopK


class Cohere2MoeForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/cohere2_moe."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Cohere2MoeConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        has_rms_norms = hf_config.get("rms_norm_eps") is not None
        if not has_rms_norms:
            hf_config["rms_norm_eps"] = read_number(hf_config, "layer_norm_eps", 1e-5)
        fields = read_dense_fields(hf_config, default_tie_word_embeddings=True)
        experts = read_expert_fields(
            hf_config, default_num_experts=8, default_top_k=2, size_field="intermediate_size"
        )
        leading_dense = read_leading_dense(hf_config, fields["num_layers"], default=0)
        has_experts = read_mlp_layer_types(hf_config, leading_dense)
        num_shared = read_count(hf_config, "num_shared_experts", 0, minimum=0)
        return Cohere2MoeConfig(
            **fields,
            **experts,
            attention=_read_attention(hf_config, fields, has_experts, leading_dense),
            has_experts=has_experts,
            has_rms_norms=has_rms_norms,
            logits_scale=read_number(hf_config, "logit_scale", 0.0625),
            dense_intermediate_size=read_count(
                hf_config, "prefix_dense_intermediate_size", fields["intermediate_size"]
            ),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
            combination=_read_name(
                hf_config, "shared_expert_combination_strategy", ("average", "sum")
            ),
            choose=_read_choice(hf_config, experts["num_experts_per_tok"]),
        )

    def __init__(
        self, config: Cohere2MoeConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm: type[nnx.Module] = RMSNorm if config.has_rms_norms else UnbiasedLayerNorm

        def make_mlp(hidden_size: int, _: int, **options: object) -> GatedMLP:
            return GatedMLP(hidden_size, config.dense_intermediate_size, **options)

        super().__init__(
            config,
            layer=ParallelLayer,
            attention=functools.partial(Attention, rotate=apply_rotary_to_neighbors, dtype=dtype),
            mlp=make_mlp,
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=functools.partial(norm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden, kernels) * self.config.logits_scale


class AveragedExpertsMLP(SharedExpertsMLP):
    """The mean of the outputs of experts and shared experts."""

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return super().__call__(x, context) / 2


def _read_attention(
    hf_config: Mapping[str, object],
    fields: Mapping[str, object],
    has_experts: tuple[bool, ...],
    leading_dense: tuple[bool, ...],
) -> tuple[AttentionConfig, ...]:
    """Full layers have no positions, except leading layers without experts."""
    pattern = read_count(hf_config, "sliding_window_pattern", 4)
    dense_pattern = read_count(hf_config, "prefix_dense_sliding_window_pattern", 1)
    num_dense = leading_dense.count(False)
    is_sliding = [
        (layer_idx + 1) % dense_pattern != 0
        if layer_idx < num_dense
        else (layer_idx - num_dense + 1) % pattern != 0
        for layer_idx in range(fields["num_layers"])
    ]
    sliding = read_attention(
        hf_config, fields, has_bias=read_flag(hf_config, "attention_bias"), default_head_dim=128
    )
    layers = attention_by_type(
        hf_config,
        is_sliding,
        full=dataclasses.replace(sliding, has_positions=False),
        sliding=sliding,
        window=read_sliding_window(hf_config, default=4096),
        max_position_embeddings=fields["max_position_embeddings"],
    )
    return tuple(
        layer if sparse or dense_pattern != 1 else dataclasses.replace(layer, has_positions=True)
        for layer, sparse in zip(layers, has_experts, strict=True)
    )


def _read_choice(hf_config: Mapping[str, object], top_k: int) -> SoftmaxTopK | SigmoidOfTopK:
    if _read_name(hf_config, "expert_selection_fn", ("softmax", "sigmoid")) == "softmax":
        return SoftmaxTopK(top_k=top_k, normalizes=True)
    return SigmoidOfTopK(top_k=top_k, normalizes=read_flag(hf_config, "norm_topk_prob", True))


def _read_name(hf_config: Mapping[str, object], field: str, names: tuple[str, str]) -> str:
    """Reads one of two names; the first one is the default."""
    name = names[0] if hf_config.get(field) is None else hf_config[field]
    if name not in names:
        raise UnsupportedModelError(
            f"config.json: {field}={name!r} is not supported; paxkv supports {', '.join(names)}."
        )
    return name


def _make_sparse_mlp(config: Cohere2MoeConfig, dtype: jnp.dtype) -> SparseMLP:
    return make_shared_experts(
        config,
        gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
        choose=config.choose,
        mlp=AveragedExpertsMLP if config.combination == "average" else SharedExpertsMLP,
        dtype=dtype,
    )
