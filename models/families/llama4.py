"""Llama 4 (text): attention in chunks or without positions, one expert and one shared expert."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.attention_config import AttentionConfig
from models.config_fields import read_count, read_flag, read_number
from models.decoder import Decoder
from models.dense_config import read_dense_fields, read_head_fields
from models.errors import ModelConfigError, UnsupportedModelError
from models.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer
from models.layers.experts import make_experts, packed_gate_up_rules
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm, UnscaledRMSNorm
from models.layers.routing import Router, Routing
from models.moe_config import MoEConfig, read_expert_fields
from models.rope_config import max_scaled_positions, parse_rope_config
from models.weight_rule import WeightRule, with_renamed_sources


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama4AttentionConfig(AttentionConfig):
    """The attention of one layer."""

    has_positions: bool  # whether queries and keys are rotated
    has_qk_norm: bool  # whether queries and keys are normed after the rotation
    # Layers without positions multiply their queries by `query_factors`. None: this layer does not.
    floor_scale: int | None
    attn_scale: float

    def __post_init__(self) -> None:
        AttentionConfig.__post_init__(self)


class Llama4ForCausalLM(Decoder):
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
                "supported for Llama4ForCausalLM; wanted 1. No release has more."
            )
        return MoEConfig(
            **fields,
            **expert_fields,
            attention=_read_attention(hf_config, fields),
            has_experts=_read_has_experts(hf_config, fields["num_layers"]),
        )

    def __init__(self, config: MoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        layers = [
            PreNormLayer(
                attention=_make_attention(attention, eps=config.rms_norm_eps, dtype=dtype),
                mlp=(
                    Llama4MoE(config, dtype=dtype)
                    if has_experts
                    else _make_mlp(config, config.intermediate_size, dtype)
                ),
                norm=norm,
            )
            for attention, has_experts in zip(config.attention, config.has_experts, strict=True)
        ]
        super().__init__(
            config, layers=layers, norm=norm(), has_head_kernel=has_head_kernel, dtype=dtype
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints rename the MLP and pack a layer's experts."""
        rules = packed_gate_up_rules(super().weight_rules(), is_turned=True)
        return with_renamed_sources(rules, lambda name: name.replace(".mlp.", ".feed_forward."))


class TurnedAttention(Attention):
    """Attention that rotates dimensions 2 * i and 2 * i + 1 as a pair, and norms after that."""

    def __init__(self, config: Llama4AttentionConfig, *, eps: float, dtype: jnp.dtype) -> None:
        norm = UnscaledRMSNorm(eps=eps) if config.has_qk_norm else None
        super().__init__(config, q_norm=norm, k_norm=norm, dtype=dtype)

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:
        q = turn_pairs(_heads(self.q_proj(normed, context), self.config.head_dim), cos, sin)
        return q if self.q_norm is None else self.q_norm(q)

    def _keys_and_values(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        k, v = self._project_keys_and_values(normed, context)
        k = turn_pairs(_heads(k, self.config.head_dim), cos, sin)
        return k if self.k_norm is None else self.k_norm(k), _heads(v, self.config.value_head_dim)


class UnturnedAttention(Attention):
    """Attention without positions (NoPE). The factor of a query grows with its position."""

    def __init__(self, config: Llama4AttentionConfig, *, dtype: jnp.dtype) -> None:
        super().__init__(config, dtype=dtype)

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:
        q = _heads(self.q_proj(normed, context), self.config.head_dim)
        if self.config.floor_scale is None:
            return q
        factors = query_factors(
            context.of_rows(context.batch.positions),
            floor_scale=self.config.floor_scale,
            attn_scale=self.config.attn_scale,
        )
        return (q.astype(jnp.float32) * factors[:, None, None]).astype(q.dtype)

    def _keys_and_values(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        k, v = self._project_keys_and_values(normed, context)
        return _heads(k, self.config.head_dim), _heads(v, self.config.value_head_dim)


class Llama4MoE(nnx.Module):
    """Each row goes through one expert and a shared expert.

    The sigmoid of the expert's score multiplies the input of the expert, not its output.
    """

    def __init__(self, config: MoEConfig, *, dtype: jnp.dtype) -> None:
        self.router = Router(config.hidden_size, config.num_experts, dtype=dtype)
        self.experts = make_experts(config, dtype=dtype)
        self.shared_expert = _make_mlp(config, config.moe_intermediate_size, dtype)

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        best, expert_ids = lax.top_k(self.router.scores(x), 1)
        scaled = (x.astype(jnp.float32) * jax.nn.sigmoid(best)).astype(x.dtype)
        routing = Routing(expert_ids, jnp.ones_like(best))
        return self.shared_expert(x, context) + self.experts(scaled, routing, context)


def turn_pairs(
    x: jax.Array,  # f[num_rows, num_heads, head_dim]
    cos: jax.Array,  # f32[num_rows, head_dim // 2]
    sin: jax.Array,  # f32[num_rows, head_dim // 2]
) -> jax.Array:  # f[num_rows, num_heads, head_dim]
    """Like `apply_rotary`, for checkpoints whose pairs are dimensions 2 * i and 2 * i + 1."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def query_factors(
    positions: jax.Array,  # i32[num_rows]
    *,
    floor_scale: int,
    attn_scale: float,
) -> jax.Array:  # f32[num_rows]
    """Factors of queries: 1 up to position `floor_scale - 2`, then rising.

    The factor rises by a smaller step after each further `floor_scale` positions.

    Source: arXiv:2501.19399, section 3.
    """
    floors = (positions + 1) // floor_scale
    return jnp.log1p(floors.astype(jnp.float32)) * attn_scale + 1.0


def _heads(x: jax.Array, head_dim: int) -> jax.Array:  # f[rows, heads * head_dim] -> f[rows, ..]
    return x.reshape(x.shape[0], -1, head_dim)


def _make_attention(attention: Llama4AttentionConfig, *, eps: float, dtype: jnp.dtype) -> Attention:
    if attention.has_positions:
        return TurnedAttention(attention, eps=eps, dtype=dtype)
    return UnturnedAttention(attention, dtype=dtype)


def _make_mlp(config: MoEConfig, intermediate_size: int, dtype: jnp.dtype) -> GatedMLP:
    return GatedMLP(
        config.hidden_size, intermediate_size, activation=config.hidden_act, dtype=dtype
    )


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
        has_positions=True,
        has_qk_norm=read_flag(hf_config, "use_qk_norm", True),
        floor_scale=None,
        attn_scale=read_number(hf_config, "attn_scale", 0.1),
    )
    floor_scale = read_count(hf_config, "floor_scale", 8192)
    unturned = dataclasses.replace(
        turned,
        has_positions=False,
        has_qk_norm=False,
        floor_scale=floor_scale if _has_temperature(hf_config) else None,
    )
    has_positions = _read_has_positions(hf_config, num_layers)
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


def _read_has_positions(hf_config: Mapping[str, object], num_layers: int) -> list[bool]:
    """For each layer, whether it rotates queries and keys: by default all but every fourth."""
    written = hf_config.get("no_rope_layers")
    if not written:
        interval = read_count(hf_config, "no_rope_layer_interval", 4)
        return [(layer_idx + 1) % interval != 0 for layer_idx in range(num_layers)]
    if (
        not isinstance(written, list)
        or len(written) < num_layers
        or any(value not in (0, 1) for value in written)
    ):
        raise ModelConfigError(
            f"config.json: no_rope_layers is {written!r}; wanted a list of {num_layers} numbers, "
            "0 for each layer without positions and 1 for each other layer."
        )
    return [value == 1 for value in written[:num_layers]]


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
            f"config.json: layer_types is {written!r}; wanted a list of {len(has_positions)} "
            "names, one for each layer."
        )
    unknown = [name for name in written if name not in ("chunked_attention", "full_attention")]
    if unknown:
        raise UnsupportedModelError(
            f"config.json: layer type {unknown[0]!r} is not supported for Llama4ForCausalLM; "
            "supported are chunked_attention, full_attention."
        )
    if chunk_size is None and "chunked_attention" in written:
        raise ModelConfigError(
            "config.json: layer_types has chunked_attention, and attention_chunk_size is null; "
            "wanted both or neither."
        )
    return [name == "chunked_attention" for name in written]


def _read_has_experts(hf_config: Mapping[str, object], num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts.

    `moe_layers` lists these layers. Without it, they are every `interleave_moe_layer_step`-th.
    """
    written = hf_config.get("moe_layers")
    if written is None:
        step = read_count(hf_config, "interleave_moe_layer_step", 1)
        return tuple((layer_idx + 1) % step == 0 for layer_idx in range(num_layers))
    if not isinstance(written, list) or any(type(layer_idx) is not int for layer_idx in written):
        raise ModelConfigError(
            f"config.json: moe_layers is {written!r}; wanted a list of layer numbers."
        )
    return tuple(layer_idx in written for layer_idx in range(num_layers))
