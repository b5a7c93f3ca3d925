"""Gemma 4 (text), dense and with experts: five sliding-window layers to one full layer with wider
heads, shared keys and values, and embeddings per layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.config.fields import read_count, read_flag
from models.config.kv_sharing import is_of_shared_kv, read_kv_owners
from models.config.layer_overrides import read_layer_overrides, without_layer_overrides
from models.config.layer_types import LayerType, read_layer_types, read_sliding_window, with_window
from models.config.rope_config import parse_ropes_by_layer_type
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.gemma2 import (
    GemmaConfig,
    read_gemma_fields,
    read_gemma_head_fields,
    read_logits_soft_cap,
)
from models.forward.carry import Carry
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.attention import (
    Attention,
    AttentionBase,
    KeysAsValuesAttention,
    SharedKVAttention,
)
from models.layers.decoder_layers import SandwichNormLayer
from models.layers.experts import Experts, packed_gate_up_rules
from models.layers.factors import Factors
from models.layers.linear import Embedding, Linear
from models.layers.mlp import GatedMLP, activate
from models.layers.per_layer_inputs import PerLayerCarry, mix_per_layer_inputs, scaled
from models.layers.rms_norm import RoundedLastRMSNorm, UnscaledRMSNorm
from models.layers.routing import Router, Routing, SoftmaxTopK
from models.layers.soft_cap import soft_cap_logits
from models.weight_rule import WeightRule

_DEFAULT_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
# Fields that `per_layer_config` may set, and their names in `AttentionConfig`.
_LAYER_FIELDS = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4AttentionConfig(AttentionConfig):
    """The attention of one layer."""

    keys_are_values: bool  # one projection makes keys and values, which differ in their norms

    def __post_init__(self) -> None:
        AttentionConfig.__post_init__(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4ExpertsConfig:
    """The experts of one layer."""

    num_experts: int
    top_k: int  # experts of each token
    intermediate_size: int  # inner width of one expert


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """The config of Gemma 4. Layers may have their own token embeddings, or experts and an MLP."""

    per_layer_size: int  # width of the token embeddings of one layer; 0: there are none
    per_layer_vocab_size: int
    has_double_wide_mlp: bool  # in layers that read the keys and values of another layer
    experts: Gemma4ExpertsConfig | None  # of every layer


class Gemma4ForCausalLM(Decoder):
    """Source: huggingface.co/docs/transformers/model_doc/gemma4."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Gemma4Config:
        hf_config = _without_vision_masks(hf_config)
        fields = read_gemma_fields(without_layer_overrides(hf_config))
        per_layer_size = read_count(hf_config, "hidden_size_per_layer_input", 256, minimum=0)
        return Gemma4Config(
            **fields,
            attention=_read_attention(hf_config, fields),
            logits_soft_cap=read_logits_soft_cap(hf_config),
            per_layer_size=per_layer_size,
            per_layer_vocab_size=_read_per_layer_vocab(hf_config, fields) if per_layer_size else 0,
            has_double_wide_mlp=read_flag(hf_config, "use_double_wide_mlp"),
            experts=_read_experts(hf_config, per_layer_size),
        )

    def __init__(self, config: Gemma4Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        eps, per_layer_size = config.rms_norm_eps, config.per_layer_size
        norm = functools.partial(RoundedLastRMSNorm, config.hidden_size, eps=eps, dtype=dtype)
        make_layer = Gemma4Layer
        if per_layer_size:
            make_layer = functools.partial(
                PerLayerInputLayer, hidden_size=config.hidden_size, per_layer_size=per_layer_size
            )
        elif config.experts is not None:
            make_layer = functools.partial(Gemma4ExpertsLayer, config=config)
        layers = []
        for attention in config.attention:
            is_wide = config.has_double_wide_mlp and attention.kv_layer_idx is not None
            mlp = GatedMLP(
                config.hidden_size,
                config.intermediate_size * (2 if is_wide else 1),
                activation=config.hidden_act,
                dtype=dtype,
            )
            own_attention = _make_attention(attention, eps=eps, dtype=dtype)
            layers.append(make_layer(attention=own_attention, mlp=mlp, norm=norm, dtype=dtype))
        super().__init__(
            config,
            layers=layers,
            norm=norm(),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
            embedding_scale=config.embedding_scale,
        )
        if not per_layer_size:
            return
        width = config.num_layers * per_layer_size
        self.embed_tokens_per_layer = Embedding(
            config.per_layer_vocab_size, width, dtype=dtype, scale=per_layer_size**0.5
        )
        self.per_layer_model_projection = Linear(config.hidden_size, width, dtype=dtype)
        self.per_layer_projection_norm = RoundedLastRMSNorm(per_layer_size, eps=eps, dtype=dtype)

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints pack the experts of a layer into two tensors."""
        return packed_gate_up_rules(super().weight_rules())

    def ignores_weight(self, name: str) -> bool:
        return is_of_shared_kv(name, self.config.attention)

    def embed(self, context: LayerContext) -> Carry:
        carry = super().embed(context)
        if not self.config.per_layer_size:
            return carry
        inputs = context.by_token(self._per_layer_inputs, context.batch.token_ids, carry.hidden)
        return PerLayerCarry(hidden=carry.hidden, per_layer_inputs=inputs)

    def _per_layer_inputs(
        self,
        token_ids: jax.Array,  # i32[num_tokens]
        embedded: jax.Array,  # f[num_tokens, hidden]
        context: LayerContext,
    ) -> jax.Array:  # f[num_tokens, num_layers, per_layer_size]
        return mix_per_layer_inputs(
            self.embed_tokens_per_layer(token_ids),
            self.per_layer_model_projection(embedded, context),
            num_layers=self.config.num_layers,
            hidden_size=self.config.hidden_size,
            norm=self.per_layer_projection_norm,
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return soft_cap_logits(super().compute_logits(hidden, kernels), self.config.logits_soft_cap)


class Gemma4Layer(SandwichNormLayer):
    """Gemma 2's layer, whose output is multiplied by a factor."""

    def __init__(
        self,
        *,
        attention: AttentionBase,
        mlp: GatedMLP,
        norm: Callable[[], nnx.Module],
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        self.layer_scalar = Factors(1, dtype=dtype)

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        return self.layer_scalar(super()._add_parts(hidden, attended, context))


class Gemma4Router(nnx.Module):
    """Chooses experts from scores of the normed rows.

    A factor for each feature multiplies the normed rows. A factor for each expert multiplies the
    weight of the expert's output.
    """

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype) -> None:
        self.norm = UnscaledRMSNorm(eps=config.rms_norm_eps)
        self.scale = Factors(config.hidden_size, dtype=dtype)
        self.proj = Router(config.hidden_size, config.experts.num_experts, dtype=dtype)
        self.per_expert_scale = Factors(config.experts.num_experts, dtype=dtype)
        self.choose = SoftmaxTopK(top_k=config.experts.top_k, normalizes=True)

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden]
    ) -> Routing:
        x = scaled(self.scale(self.norm(x)), x.shape[-1] ** -0.5)
        expert_ids, weights = self.choose(self.proj.scores(x))
        own_scale = self.per_expert_scale.scale[...].astype(jnp.float32)
        return Routing(expert_ids, weights * own_scale[expert_ids])


class Gemma4ExpertsLayer(Gemma4Layer):
    """Gemma 4's layer, with experts in addition to the MLP. Both have their own norms."""

    def __init__(
        self,
        *,
        attention: AttentionBase,
        mlp: GatedMLP,
        norm: Callable[[], nnx.Module],
        config: Gemma4Config,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm, dtype=dtype)
        self.router = Gemma4Router(config, dtype=dtype)
        self.experts = Experts(
            config.experts.num_experts,
            config.hidden_size,
            config.experts.intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        )
        # Norm 1 is for the MLP's output. Norms 2 are for the experts' input and output.
        self.post_feedforward_layernorm_1 = norm()
        self.pre_feedforward_layernorm_2 = norm()
        self.post_feedforward_layernorm_2 = norm()

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        out = self.self_attn.project_out(attended, context)
        hidden = hidden + self.post_attention_layernorm(out)
        dense = self.mlp(self.pre_feedforward_layernorm(hidden), context)
        routing = self.router(hidden)
        sparse = self.experts(self.pre_feedforward_layernorm_2(hidden), routing, context)
        out = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(sparse)
        return self.layer_scalar(hidden + self.post_feedforward_layernorm(out))


class PerLayerInputLayer(SandwichNormLayer):
    """Gemma 4's layer, which also adds the tokens' embeddings for this layer, with a gate."""

    def __init__(
        self,
        *,
        attention: AttentionBase,
        mlp: GatedMLP,
        norm: Callable[[], nnx.Module],
        hidden_size: int,
        per_layer_size: int,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        self.per_layer_input_gate = Linear(hidden_size, per_layer_size, dtype=dtype)
        self.per_layer_projection = Linear(per_layer_size, hidden_size, dtype=dtype)
        self.post_per_layer_input_norm = norm()
        self.layer_scalar = Factors(1, dtype=dtype)

    def __call__(
        self, carry: PerLayerCarry, pages: Pages, context: LayerContext
    ) -> tuple[PerLayerCarry, Pages]:
        attended, pages = self.self_attn(carry.hidden, pages, context, norm=self.input_layernorm)
        hidden = context.kept(carry.hidden)
        own_inputs = context.kept(carry.own_inputs(context))
        hidden = context.of_kept().by_token(self._add_all, hidden, attended, own_inputs)
        return dataclasses.replace(carry, hidden=hidden), pages

    def _add_all(
        self,
        hidden: jax.Array,  # f[num_queries, hidden]
        attended: jax.Array,  # f[num_queries, num_q_heads, head_dim]
        own_inputs: jax.Array,  # f[num_queries, per_layer_size]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        hidden = self._add_parts(hidden, attended, context)
        gate = activate(self.per_layer_input_gate(hidden, context), self.mlp.activation)
        out = self.per_layer_projection(gate * own_inputs, context)
        return self.layer_scalar(hidden + self.post_per_layer_input_norm(out))


def _make_attention(
    attention: Gemma4AttentionConfig, *, eps: float, dtype: jnp.dtype
) -> AttentionBase:
    norm = functools.partial(RoundedLastRMSNorm, attention.head_dim, eps=eps, dtype=dtype)
    if attention.kv_layer_idx is not None:
        return SharedKVAttention(attention, q_norm=norm(), dtype=dtype)
    make = KeysAsValuesAttention if attention.keys_are_values else Attention
    v_norm = UnscaledRMSNorm(eps=eps)
    return make(attention, q_norm=norm(), k_norm=norm(), v_norm=v_norm, dtype=dtype)


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[Gemma4AttentionConfig, ...]:
    """Reads the attention of each layer."""
    num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
    window = read_sliding_window(hf_config, default=512)
    layer_types = _read_types(hf_config, num_layers, window)
    ropes = hf_config.get("rope_parameters")
    ropes = _DEFAULT_ROPES if ropes is None else ropes
    rope, sliding_rope = parse_ropes_by_layer_type(
        {**hf_config, "rope_parameters": ropes}, max_positions, required_types=set(layer_types)
    )
    by_layer = read_layer_overrides(hf_config, num_layers, supported=_LAYER_FIELDS)
    owners = read_kv_owners(hf_config, layer_types, default_num_shared=0)
    heads = read_gemma_head_fields(hf_config) | {"scale": 1.0}
    keys_are_values = read_flag(hf_config, "attention_k_eq_v")
    attention = []
    for layer_idx, layer_type in enumerate(layer_types):
        is_full = layer_type == "full_attention"
        own = None if by_layer is None else by_layer.get(layer_idx, {})
        own_heads = _read_own_heads(hf_config, own, is_full=is_full)
        try:
            layer = Gemma4AttentionConfig(
                **heads | own_heads,
                rope=rope if is_full else sliding_rope,
                kv_layer_idx=owners[layer_idx],
                keys_are_values=is_full and keys_are_values,
            )
        except ModelConfigError as error:
            if not own_heads:
                raise
            raise ModelConfigError(
                f"{error} Layer {layer_idx} has sizes of its own: see global_head_dim, "
                "num_global_key_value_heads and per_layer_config."
            ) from error
        attention.append(layer if is_full else with_window(layer, window, max_positions))
    return tuple(attention)


def _read_types(
    hf_config: Mapping[str, object], num_layers: int, window: int | None
) -> tuple[LayerType, ...]:
    """Reads the type of each layer: by default, every sixth is full and the others slide.

    The last layer is always full, even if config.json says otherwise.
    """
    is_sliding = [(layer_idx + 1) % 6 != 0 for layer_idx in range(num_layers)]
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    return (*layer_types[:-1], "full_attention")


def _read_own_heads(
    hf_config: Mapping[str, object], own: Mapping[str, object] | None, *, is_full: bool
) -> dict[str, int]:
    """Reads the sizes of heads in which a layer differs from the sizes common to all layers.

    Args:
        own: The layer's fields in `per_layer_config`. None: there is no `per_layer_config`. In this
            case `global_head_dim` applies to full layers. `num_global_key_value_heads` applies to
            them too, but only if one projection makes keys and values.

    Returns:
        Fields of `AttentionConfig`.
    """
    names = _LAYER_FIELDS
    if own is None:
        names = {"global_head_dim": "head_dim"} if is_full else {}
        if is_full and read_flag(hf_config, "attention_k_eq_v"):
            names["num_global_key_value_heads"] = "num_kv_heads"
        own = {"global_head_dim": 512, **hf_config}
    return {
        own_name: read_count(own, name)
        for name, own_name in names.items()
        if own.get(name) is not None
    }


def _read_per_layer_vocab(hf_config: Mapping[str, object], fields: Mapping[str, object]) -> int:
    num_tokens = read_count(hf_config, "vocab_size_per_layer_input", 262_144)
    if num_tokens < fields["vocab_size"]:
        raise ModelConfigError(
            f"config.json: vocab_size_per_layer_input={num_tokens} is less than "
            f"vocab_size={fields['vocab_size']}; expected an embedding for every token."
        )
    return num_tokens


def _read_experts(
    hf_config: Mapping[str, object], per_layer_size: int
) -> Gemma4ExpertsConfig | None:
    """Reads the experts of each layer; None if `enable_moe_block` is not set.

    Raises:
        UnsupportedModelError: The layers also have embeddings of their own.
        ModelConfigError: A field is missing, or a token goes to more experts than exist.
    """
    if not read_flag(hf_config, "enable_moe_block"):
        return None
    if per_layer_size:
        raise UnsupportedModelError(
            "config.json: enable_moe_block is set, and hidden_size_per_layer_input is "
            f"{per_layer_size}; Gemma4ForCausalLM is supported with experts or with embeddings per "
            "layer, not with both. Expected 0."
        )
    num_experts = read_count(hf_config, "num_experts")
    top_k = read_count(hf_config, "top_k_experts")
    if top_k > num_experts:
        raise ModelConfigError(
            f"config.json: top_k_experts is {top_k}, and num_experts is {num_experts}; a token "
            "cannot have more experts than there are."
        )
    return Gemma4ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read_count(hf_config, "moe_intermediate_size"),
    )


def _without_vision_masks(hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """Drops the mask by which all tokens of an image see each other: paxkv takes no images."""
    if hf_config.get("use_bidirectional_attention") == "vision":
        return {**hf_config, "use_bidirectional_attention": None}
    return hf_config
