"""Llama 4 (text): attention in chunks in most layers, full attention without positions in the
others, and experts with a shared expert in all or some layers.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, read_layer_numbers, read_number
from models.config.layer_types import read_has_positions
from models.config.moe_config import MoEConfig, read_expert_fields
from models.config.rope_config import max_scaled_positions, parse_rope_config
from models.decoders.moe_decoder import MoEDecoder
from models.errors import ModelConfigError, UnsupportedModelError
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.attention_variants import (
    NormedLastAttention,
    QueryScale,
    ScaledQueriesAttention,
)
from models.layers.experts import make_experts, packed_gate_up_rules
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm, UnscaledRMSNorm
from models.layers.rotary import apply_rotary_to_neighbors
from models.layers.routing import Router, Routing
from models.weight_rule import WeightRule, with_renamed_sources


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama4AttentionConfig(AttentionConfig):
    """The attention of one layer."""

    has_qk_norm: bool  # whether queries and keys are normed after the rotation
    # Of layers without positions, unless config.json switches it off.
    query_scale: QueryScale | None

    def __post_init__(self) -> None:
        AttentionConfig.__post_init__(self)


class Llama4ForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/llama4."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MoEConfig:
        # transformers has these defaults. A token id that is null stays None.
        eps = read_number(hf_config, "rms_norm_eps", 1e-5)
        hf_config = {"bos_token_id": 1, "eos_token_id": 2, **hf_config, "rms_norm_eps": eps}
        fields = read_dense_fields(hf_config)
        fields["intermediate_size"] = read_count(hf_config, "intermediate_size_mlp", 16_384)
        expert_fields = read_expert_fields(
            hf_config,
            num_experts_fields=("num_local_experts",),
            default_num_experts=16,
            default_top_k=1,
            size_field="intermediate_size",
            default_size=8192,
        )
        if expert_fields["num_experts_per_tok"] != 1:
            raise UnsupportedModelError(
                f"config.json: num_experts_per_tok={expert_fields['num_experts_per_tok']} is not "
                "supported for Llama4ForCausalLM; expected 1. No release has more."
            )
        return MoEConfig(
            **fields,
            **expert_fields,
            attention=_read_attention(hf_config, fields),
            has_experts=_read_has_experts(hf_config, fields["num_layers"]),
        )

    def __init__(self, config: MoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            attention=functools.partial(_make_attention, eps=config.rms_norm_eps, dtype=dtype),
            sparse_mlp=functools.partial(Llama4MoE, config, dtype=dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints rename the MLP and pack a layer's experts."""
        rules = packed_gate_up_rules(super().weight_rules(), is_turned=True)
        return with_renamed_sources(rules, lambda name: name.replace(".mlp.", ".feed_forward."))


class Llama4MoE(nnx.Module):
    """Each row goes through one expert and a shared expert.

    The sigmoid of the expert's score multiplies the input of the expert, not its output.
    """

    def __init__(self, config: MoEConfig, *, dtype: jnp.dtype) -> None:
        self.router = Router(config.hidden_size, config.num_experts, dtype=dtype)
        self.experts = make_experts(config, dtype=dtype)
        self.shared_expert = GatedMLP(
            config.hidden_size,
            config.moe_intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        )

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        best, expert_ids = lax.top_k(self.router.scores(x), 1)
        scaled = (x.astype(jnp.float32) * jax.nn.sigmoid(best)).astype(x.dtype)
        routing = Routing(expert_ids, jnp.ones_like(best))
        return self.shared_expert(x, context) + self.experts(scaled, routing, context)


def _make_attention(attention: Llama4AttentionConfig, *, eps: float, dtype: jnp.dtype) -> Attention:
    rotate = apply_rotary_to_neighbors
    if attention.query_scale is not None:
        query_scale = attention.query_scale
        return ScaledQueriesAttention(
            attention, query_scale=query_scale, rotate=rotate, dtype=dtype
        )
    norm = UnscaledRMSNorm(eps=eps) if attention.has_qk_norm else None
    return NormedLastAttention(attention, q_norm=norm, k_norm=norm, rotate=rotate, dtype=dtype)


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[Llama4AttentionConfig, ...]:
    """Reads the attention of each layer."""
    num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
    has_bias = read_flag(hf_config, "attention_bias")
    theta = read_number(hf_config, "rope_theta", 500_000.0)
    rope = parse_rope_config({**hf_config, "rope_theta": theta}, max_positions)
    turned = Llama4AttentionConfig(
        **read_head_fields(
            hf_config,
            default_num_kv_heads=8,
            # A null means the hidden size divided by the number of heads. A missing field means
            # 128.
            default_head_dim=None if "head_dim" in hf_config else 128,
        ),
        rope=rope,
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_qk_norm=read_flag(hf_config, "use_qk_norm", True),
        query_scale=None,
    )
    query_scale = QueryScale(
        weight=read_number(hf_config, "attn_scale", 0.1),
        period=read_count(hf_config, "floor_scale", 8192),
        offset=1,
    )
    unturned = dataclasses.replace(
        turned,
        has_positions=False,
        has_qk_norm=False,
        query_scale=query_scale if _has_temperature(hf_config) else None,
    )
    has_positions = read_has_positions(hf_config, num_layers)
    chunk_size = _read_chunk_size(hf_config)
    is_chunked = _read_is_chunked(hf_config, has_positions, chunk_size)
    if chunk_size is not None and chunk_size >= max_scaled_positions(rope, max_positions):
        chunk_size = None
    return tuple(
        dataclasses.replace(
            turned if is_turned else unturned, chunk_size=chunk_size if has_chunks else None
        )
        for is_turned, has_chunks in zip(has_positions, is_chunked, strict=True)
    )


def _has_temperature(hf_config: Mapping[str, object]) -> bool:
    # The first releases have a number here: 0 means false, and any other number true.
    name = "attn_temperature_tuning"
    value = hf_config.get(name)
    return bool(value) if type(value) is int else read_flag(hf_config, name, True)


def _read_chunk_size(hf_config: Mapping[str, object]) -> int | None:
    """Reads the size of chunks. A null means no chunks; a missing field means the default."""
    if hf_config.get("attention_chunk_size", 8192) is None:
        return None
    return read_count(hf_config, "attention_chunk_size", 8192)


def _read_is_chunked(
    hf_config: Mapping[str, object], has_positions: list[bool], chunk_size: int | None
) -> list[bool]:
    """For each layer, whether it attends in chunks: by default the layers with positions do."""
    written = hf_config.get("layer_types")
    if written is None:
        return [chunk_size is not None and is_turned for is_turned in has_positions]
    if not isinstance(written, list) or len(written) != len(has_positions):
        raise ModelConfigError(
            f"config.json: layer_types is {written!r}; expected a list of {len(has_positions)} "
            "names, one for each layer."
        )
    unknown = [name for name in written if name not in ("chunked_attention", "full_attention")]
    if unknown:
        raise UnsupportedModelError(
            f"config.json: layer type {unknown[0]!r} is not supported for Llama4ForCausalLM; "
            "paxkv supports chunked_attention and full_attention."
        )
    if chunk_size is None and "chunked_attention" in written:
        raise ModelConfigError(
            "config.json: layer_types has chunked_attention, and attention_chunk_size is null; "
            "set both or neither."
        )
    return [name == "chunked_attention" for name in written]


def _read_has_experts(hf_config: Mapping[str, object], num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts.

    `moe_layers` lists these layers. Without it, they are every `interleave_moe_layer_step`-th.
    """
    written = read_layer_numbers(hf_config, "moe_layers")
    if written is None:
        step = read_count(hf_config, "interleave_moe_layer_step", 1)
        return tuple((layer_idx + 1) % step == 0 for layer_idx in range(num_layers))
    return tuple(layer_idx in written for layer_idx in range(num_layers))
