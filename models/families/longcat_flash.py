"""LongCat-Flash: layers with two attentions, two MLPs, and experts that are added at the end."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import CacheFormat, Pages
from models.config.attention_config import SELF_ATTENTION
from models.config.dense_config import read_dense_fields
from models.config.fields import (
    read_count,
    read_number,
    refuse_other_values,
    with_defaults,
    with_main_names,
)
from models.config.latent_config import LatentAttentionConfig, read_latent_attention
from models.config.moe_config import MoEConfig
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.experts import make_experts
from models.layers.latent_attention import LatentAttention
from models.layers.latent_variants import ScaledLatentsAttention
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm
from models.layers.routing import CorrectedRouter
from models.layers.routing_rules import ScaledCorrectedSoftmaxTopK
from models.layers.zero_experts import ZeroExpertsMLP
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12_288,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
    "zero_expert_num": 256,
}
_SUPPORTED = {"mla_scale_kv_lora": True, "mla_scale_q_lora": True, "zero_expert_type": "identity"}
# Names that other families have for fields -> LongCat-Flash's names.
_OWN_NAMES = {
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
    "num_local_experts": "n_routed_experts",
}
_STORED_NAMES = {
    ".mlp.gate.weight": ".mlp.router.classifier.weight",
    ".mlp.gate.e_score": ".mlp.router.e_score",
}
# The local names of the caches of a layer's two attentions.
_CACHES = (f"{SELF_ATTENTION}.0", f"{SELF_ATTENTION}.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLatentAttentionsConfig(LatentAttentionConfig):
    """The two attentions of a layer, which differ in their weights only."""

    def formats(self, kv_dtype: str) -> dict[str, CacheFormat]:
        """See `AttentionConfig.formats`."""
        return dict.fromkeys(_CACHES, self.format(kv_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongcatFlashConfig(MoEConfig):
    """The config of LongCat-Flash."""

    choose: ScaledCorrectedSoftmaxTopK
    num_zero_experts: int  # experts that return their input, after the `num_experts` others


class LongcatFlashForCausalLM(Decoder):
    """Source: arXiv:2509.01322."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LongcatFlashConfig:
        hf_config = with_defaults(_with_own_names(hf_config), _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        sizes = {
            "num_hidden_layers": read_count(hf_config, "num_layers"),
            "intermediate_size": read_count(hf_config, "ffn_hidden_size"),
        }
        model_fields = read_dense_fields(hf_config | sizes)
        num_experts = read_count(hf_config, "n_routed_experts")
        num_zero = read_count(hf_config, "zero_expert_num", minimum=0)
        top_k = read_count(hf_config, "moe_topk")
        if top_k > num_experts + num_zero:
            raise ModelConfigError(
                f"config.json: moe_topk is {top_k}, n_routed_experts is {num_experts} and "
                f"zero_expert_num is {num_zero}; a token cannot have more experts than there are."
            )
        factor = read_number(hf_config, "routed_scaling_factor", 6.0)
        attention = _read_attention(hf_config, model_fields["max_position_embeddings"])
        return LongcatFlashConfig(
            **model_fields,
            attention=(attention,) * model_fields["num_layers"],
            num_experts=num_experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=read_count(hf_config, "expert_ffn_hidden_size"),
            has_experts=(True,) * model_fields["num_layers"],
            choose=ScaledCorrectedSoftmaxTopK(top_k=top_k, factor=factor),
            num_zero_experts=num_zero,
        )

    def __init__(
        self, config: LongcatFlashConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            layers=[ShortcutLayer(config, attention, dtype) for attention in config.attention],
            norm=RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        return with_stored_names(super().weight_rules(), _STORED_NAMES)

    def ignores_weight(self, name: str) -> bool:
        """See `Decoder.ignores_weight`. transformers does not add the bias of the router either.

        It also saves projections of experts that return their input.
        """
        expert = re.search(r"\.mlp\.experts\.(\d+)\.", name)
        is_zero = expert is not None and int(expert[1]) >= self.config.num_experts
        return is_zero or name.startswith("model.mtp.") or name.endswith(".classifier.bias")


class ShortcutLayer(nnx.Module):
    """Attention, an MLP, attention, an MLP. Experts read what the first MLP reads.

    The output of the experts is added at the end of the layer.

    Source: arXiv:2404.05019.
    """

    def __init__(
        self, config: LongcatFlashConfig, attention: LatentAttentionConfig, dtype: jnp.dtype
    ) -> None:
        sizes = (config.hidden_size, config.intermediate_size)
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = nnx.List([norm() for _ in _CACHES])
        self.self_attn = nnx.List([_make_attention(attention, name, dtype) for name in _CACHES])
        self.post_attention_layernorm = nnx.List([norm() for _ in _CACHES])
        self.mlps = nnx.List(
            [GatedMLP(*sizes, activation=config.hidden_act, dtype=dtype) for _ in _CACHES]
        )
        self.mlp = ZeroExpertsMLP(
            gate=CorrectedRouter(config.hidden_size, config.num_experts + config.num_zero_experts),
            choose=config.choose,
            experts=make_experts(config, dtype=dtype),
        )

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        # The second attention caches all tokens.
        whole = context.with_all_rows()
        norms = self.input_layernorm
        attended, pages = self.self_attn[0](carry.hidden, pages, whole, norm=norms[0])
        hidden, normed = whole.by_token(self._first_half, carry.hidden, attended)
        attended, pages = self.self_attn[1](hidden, pages, context, norm=norms[1])
        kept = (context.kept(hidden), context.kept(normed), attended)
        hidden = context.of_kept().by_token(self._second_half, *kept)
        return replace(carry, hidden=hidden), pages

    def _first_half(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        attended: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, hidden], both
        """The residual stream after the first MLP, and the input of that MLP."""
        hidden = hidden + self.self_attn[0].project_out(attended, context)
        normed = self.post_attention_layernorm[0](hidden)
        return hidden + self.mlps[0](normed, context), normed

    def _second_half(
        self,
        hidden: jax.Array,  # f[num_queries, hidden]
        normed: jax.Array,  # f[num_queries, hidden]
        attended: jax.Array,  # f[num_queries, num_q_heads, latent_dim]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        hidden = hidden + self.self_attn[1].project_out(attended, context)
        out = self.mlps[1](self.post_attention_layernorm[1](hidden), context)
        return hidden + out + self.mlp(normed, context)


def _make_attention(
    config: LatentAttentionConfig, cache_name: str, dtype: jnp.dtype
) -> LatentAttention:
    return ScaledLatentsAttention(
        config,
        q_factor=(config.hidden_size / config.q_latent_dim) ** 0.5,
        latent_factor=(config.hidden_size / config.latent_dim) ** 0.5,
        cache_name=cache_name,
        dtype=dtype,
    )


def _with_own_names(hf_config: Mapping[str, object]) -> dict[str, object]:
    fields = with_main_names(hf_config, _OWN_NAMES)
    if fields.get("num_layers") is None and fields.get("num_hidden_layers") is not None:
        # transformers counts attentions there.
        fields["num_layers"] = read_count(fields, "num_hidden_layers") // 2
    return fields


def _read_attention(
    hf_config: Mapping[str, object], max_position_embeddings: int
) -> TwoLatentAttentionsConfig:
    one = read_latent_attention(hf_config, max_position_embeddings, default_q_latent_dim=1536)
    # transformers computes both from the other widths, but takes other values.
    for name, width in (("qk_head_dim", one.head_dim), ("head_dim", one.rotary_dim)):
        if read_count(hf_config, name, width) != width:
            raise ModelConfigError(
                f"config.json: {name} is {hf_config[name]}; expected {width}, which follows from "
                "qk_nope_head_dim and qk_rope_head_dim."
            )
    return TwoLatentAttentionsConfig(
        **{field.name: getattr(one, field.name) for field in fields(one)}
    )
