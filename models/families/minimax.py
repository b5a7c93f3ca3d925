"""MiniMax-01: experts, and lightning attention in place of attention in most layers."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_number, with_defaults
from models.config.layer_types import read_sliding_window, with_window
from models.config.moe_config import MoEConfig, read_expert_fields
from models.config.state_layers import read_has_state
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.layer_loop import Layer
from models.decoders.moe_decoder import MoEDecoder
from models.families.mixtral import make_sparse_mlp
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer
from models.layers.lightning_attention import (
    LIGHTNING,
    LightningAttention,
    LightningConfig,
    slope_rule,
)
from models.layers.mlp import MLP
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import SelfAttention
from models.layers.sparse_mlp import block_sparse_moe_rules
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 131_072,
}
# Tensors of checkpoints that transformers computes from the slopes. They are not read.
_COMPUTED = (".query_decay", ".key_decay", ".diagonal_decay")


@dataclass(frozen=True, slots=True)
class ResidualFactors:
    """A part of a layer adds its output, times `beta`, to its input, times `alpha`."""

    alpha: float
    beta: float

    def add(self, entered: jax.Array, out: jax.Array) -> jax.Array:
        if self.alpha == self.beta == 1.0:
            return entered + out
        return entered * self.alpha + out * self.beta


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxConfig(MoEConfig):
    """The config of MiniMax-01. Layers without attention have a `LightningAttention`."""

    lightning: LightningConfig
    full_factors: ResidualFactors  # of attention
    lightning_factors: ResidualFactors
    mlp_factors: ResidualFactors

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, LIGHTNING, self.lightning.format())


class MiniMaxLayer(PreNormLayer):
    """A layer that adds the outputs of its parts to the normed hidden states."""

    def __init__(
        self,
        *,
        attention: SelfAttention,
        mlp: MLP,
        norm: Callable[[], nnx.Module],
        attention_factors: ResidualFactors,
        mlp_factors: ResidualFactors,
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        self.attention_factors, self.mlp_factors = attention_factors, mlp_factors

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        out = self.self_attn.project_out(attended, context)
        hidden = self.attention_factors.add(self.input_layernorm(hidden), out)
        hidden = self.post_attention_layernorm(hidden)
        return self.mlp_factors.add(hidden, self.mlp(hidden, context))


class MiniMaxForCausalLM(MoEDecoder):
    """Source: arXiv:2501.08313."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MiniMaxConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        num_layers = fields["num_layers"]
        attention = read_attention(hf_config, fields, default_num_kv_heads=8)
        window = read_sliding_window(hf_config, None)
        attention = with_window(attention, window, fields["max_position_embeddings"])
        by_rule = [layer_idx % 2 == 1 for layer_idx in range(num_layers)]
        return MiniMaxConfig(
            **fields,
            **read_expert_fields(
                hf_config, default_num_experts=8, default_top_k=2, size_field="intermediate_size"
            ),
            attention=tuple(
                None if has_state else attention
                for has_state in read_has_state(hf_config, by_rule, "linear_attention")
            ),
            has_experts=(True,) * num_layers,
            lightning=LightningConfig(
                hidden_size=fields["hidden_size"],
                num_heads=attention.num_q_heads,
                head_dim=attention.head_dim,
                activation=fields["hidden_act"],
            ),
            full_factors=_read_factors(hf_config, "full_attn"),
            lightning_factors=_read_factors(hf_config, "linear_attn"),
            mlp_factors=_read_factors(hf_config, "mlp"),
        )

    def __init__(self, config: MiniMaxConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return LightningAttention(config.lightning, dtype=dtype)
            return Attention(attention, dtype=dtype)

        def make_layer(*, attention: SelfAttention, **parts: object) -> Layer:
            is_lightning = isinstance(attention, LightningAttention)
            return MiniMaxLayer(
                attention=attention,
                attention_factors=(
                    config.lightning_factors if is_lightning else config.full_factors
                ),
                mlp_factors=config.mlp_factors,
                **parts,
            )

        super().__init__(
            config,
            layer=make_layer,
            attention=make_mixer,
            sparse_mlp=functools.partial(make_sparse_mlp, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Experts have Mixtral's names. Slopes depend on the layer."""
        rules = block_sparse_moe_rules(super().weight_rules())
        num_layers = len(self.config.attention)
        for layer_idx, attention in enumerate(self.config.attention):
            if attention is None:
                name = f"layers.{layer_idx}.self_attn"
                rules[f"{name}.log_slopes"] = slope_rule(
                    f"model.{name}",
                    self.config.lightning.num_heads,
                    layer_idx=layer_idx,
                    num_layers=num_layers,
                )
        return rules

    def ignores_weight(self, name: str) -> bool:
        return name.endswith(_COMPUTED)


def _read_factors(hf_config: Mapping[str, object], part: str) -> ResidualFactors:
    return ResidualFactors(
        alpha=read_number(hf_config, f"{part}_alpha_factor", 1.0),
        beta=read_number(hf_config, f"{part}_beta_factor", 1.0),
    )
