"""ZAYA1: convolutions of queries and keys, partial rotary embeddings, and experts in every layer.

Each layer's router is an MLP that passes a state to the next layer's router. The residual stream is
float32.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.cache.format import Pages
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, refuse_other_values, with_defaults
from models.config.layer_types import read_sliding_window, with_window
from models.config.moe_config import MoEConfig, read_expert_fields
from models.config.partial_rotary import parse_partial_rope
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.chained_router import ChainedRouter
from models.layers.convolutional_attention import (
    ConvolutionalAttention,
    ConvolutionalAttentionConfig,
)
from models.layers.experts import make_experts, packed_gate_up_rules
from models.layers.rms_norm import RoundedInputRMSNorm
from models.layers.routing_rules import ScaledCorrectedSoftmaxTopK
from models.layers.shifted_factors import ScaledSum, ShiftedFactors
from models.weight_rule import WeightRule, with_stored_names

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "bos_token_id": 2,
    "eos_token_id": 106,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        _FULL: {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
        _SLIDING: {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
    "tie_word_embeddings": True,
}
_SUPPORTED = {"lm_head_bias": False, "num_experts_per_tok": 1}
# Modules that checkpoints have inside a module `qkv_proj`.
_OF_PROJECTION = (
    *("q_proj", "k_proj", "v_proj_current", "v_proj_delayed"),
    *("conv_qk_depthwise", "conv_qk_grouped"),
)
_STORED_NAMES = {f".self_attn.{name}.": f".self_attn.qkv_proj.{name}." for name in _OF_PROJECTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZayaConfig(MoEConfig):
    """The config of ZAYA1."""

    router_width: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RouterCarry(Carry):
    """The residual stream, which is float32, and the state of the previous layer's router."""

    router_state: jax.Array  # f[num_tokens, router_width]


class ZayaForCausalLM(Decoder):
    """Source: huggingface.co/docs/transformers/model_doc/zaya."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> ZayaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        experts = read_expert_fields(
            hf_config, default_num_experts=16, default_top_k=1, default_size=2048
        )
        # `read_dense_fields` needs a width, but no layer has a dense MLP.
        width = {"intermediate_size": experts["moe_intermediate_size"]}
        fields = read_dense_fields(hf_config | width)
        return ZayaConfig(
            **fields,
            **experts,
            attention=_read_attention(
                hf_config, fields["num_layers"], fields["max_position_embeddings"]
            ),
            has_experts=(True,) * fields["num_layers"],
            router_width=read_count(hf_config, "router_hidden_size", 256),
        )

    def __init__(self, config: ZayaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(
            RoundedInputRMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype
        )
        super().__init__(
            config,
            layers=[
                ZayaLayer(config, attention, norm=norm, dtype=dtype)
                for attention in config.attention
            ],
            norm=norm(),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
        self.input_hidden_states = ShiftedFactors(config.hidden_size, dtype=dtype)
        self.dtype = dtype

    def embed(self, context: LayerContext) -> RouterCarry:
        hidden = self.input_hidden_states(super().embed(context).hidden)
        no_state = jnp.zeros((hidden.shape[0], self.config.router_width), hidden.dtype)
        return RouterCarry(hidden=hidden.astype(jnp.float32), router_state=no_state)

    def tap(self, carry: RouterCarry) -> jax.Array:  # f[num_tokens, hidden]
        return carry.hidden.astype(self.dtype)

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints pack all experts of a layer, and have no state scale for layer 0.

        No router is before that layer.
        """
        rules = with_stored_names(packed_gate_up_rules(super().weight_rules()), _STORED_NAMES)
        name = "layers.0.mlp.gate.router_states_scale.scale"
        (source,) = rules[name].sources
        rules[name] = replace(
            rules[name],
            sources=(),
            combine=lambda _: np.ones(source.shape, np.float32),
        )
        return rules


class ChainedExperts(nnx.Module):
    """Experts that a `ChainedRouter` chooses. A token may skip all of them."""

    def __init__(self, config: ZayaConfig, *, dtype: jnp.dtype) -> None:
        """Makes the block with weights to be filled in."""
        # The last choice is to skip the experts.
        self.gate = ChainedRouter(
            config.hidden_size,
            config.router_width,
            config.num_experts + 1,
            eps=config.rms_norm_eps,
            dtype=dtype,
        )
        self.choose = ScaledCorrectedSoftmaxTopK(top_k=1, factor=1.0)
        self.experts = make_experts(config, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        router_state: jax.Array,  # f[num_rows, router_width], of the layer before
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """The output f[num_rows, hidden], and the state f[num_rows, router_width]."""
        # Expert `num_experts` does not exist: its rows are skipped, like rows of padding.
        routing, router_state = self.gate.route(x, router_state, self.choose)
        return self.experts(x, routing, context), router_state


class ZayaLayer(nnx.Module):
    """Attention, then experts. Each reads the normed stream; a `ScaledSum` adds its output."""

    def __init__(
        self,
        config: ZayaConfig,
        attention: ConvolutionalAttentionConfig,
        *,
        norm: functools.partial[nnx.Module],
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in."""
        self.input_layernorm = norm()
        self.self_attn = ConvolutionalAttention(attention, dtype=dtype)
        self.post_attention_residual_scale = ScaledSum(config.hidden_size, dtype=dtype)
        self.post_attention_layernorm = norm()
        self.mlp = ChainedExperts(config, dtype=dtype)
        self.post_mlp_residual_scale = ScaledSum(config.hidden_size, dtype=dtype)
        self.dtype = dtype

    def __call__(
        self, carry: RouterCarry, pages: Pages, context: LayerContext
    ) -> tuple[RouterCarry, Pages]:
        attended, pages = self.self_attn(carry.hidden, pages, context, norm=self.input_layernorm)
        hidden, router_state = context.of_kept().by_token(
            self._add_parts,
            *(context.kept(carry.hidden), attended, context.kept(carry.router_state)),
        )
        return RouterCarry(hidden=hidden, router_state=router_state), pages

    def _add_parts(
        self,
        hidden: jax.Array,  # f32[num_queries, hidden]
        attended: jax.Array,  # f[num_queries, num_q_heads, head_dim]
        router_state: jax.Array,  # f[num_queries, router_width]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        out = self.self_attn.project_out(attended, context)
        hidden = self.post_attention_residual_scale(hidden, out)
        normed = self.post_attention_layernorm(hidden)
        out, router_state = self.mlp(normed, router_state, context)
        return self.post_mlp_residual_scale(hidden, out), router_state


def _read_attention(
    hf_config: Mapping[str, object], num_layers: int, max_positions: int
) -> tuple[ConvolutionalAttentionConfig, ...]:
    """The attention of each layer.

    Raises:
        ModelConfigError: `layer_types` is not a list with a known name for each layer, or a type of
            layer lacks its window or its rotary embedding.
    """
    types = hf_config.get("layer_types")
    types = [_FULL] * num_layers if types is None else types
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(name not in (_FULL, _SLIDING) for name in types)
    ):
        raise ModelConfigError(
            f"config.json: layer_types is {types!r}; expected a list of {num_layers} names, one "
            f"for each layer, of {_FULL}, {_SLIDING}."
        )
    window = read_sliding_window(hf_config, default=None)
    if window is None and _SLIDING in types:
        raise ModelConfigError(
            "config.json: layer_types has sliding layers, and sliding_window is null; expected a "
            "window. Use the config.json that was published with the weights."
        )
    heads = read_head_fields(hf_config)
    has_bias = read_flag(hf_config, "attention_bias")
    sizes = tuple(read_count(hf_config, f"cca_time{idx}", 2, minimum=2) for idx in range(2))

    def read(layer_type: str) -> ConvolutionalAttentionConfig:
        ropes = hf_config["rope_parameters"]
        fields = ropes.get(layer_type) if isinstance(ropes, Mapping) else None
        if not isinstance(fields, Mapping) or fields.get("rope_theta") is None:
            raise ModelConfigError(
                f"config.json: rope_parameters has no rope_theta for {layer_type}; expected one "
                "for each type of layer in the model. Use the config.json that was published with "
                "the weights."
            )
        of_type = {"architectures": hf_config["architectures"], "rope_parameters": fields}
        rope, factor = parse_partial_rope(of_type, max_positions, default_factor=1.0)
        attention = ConvolutionalAttentionConfig(
            **heads,
            rope=rope,
            rotary_dim=int(heads["head_dim"] * factor),
            qkv_bias=has_bias,
            out_bias=has_bias,
            kernel_sizes=sizes,
        )
        return attention if layer_type == _FULL else with_window(attention, window, max_positions)

    of_types = {layer_type: read(layer_type) for layer_type in dict.fromkeys(types)}
    return tuple(of_types[layer_type] for layer_type in types)
