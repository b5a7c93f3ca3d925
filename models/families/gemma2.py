"""Gemma 2: norms on both sides of each part, soft caps of attention scores and logits, and a window
on every second layer.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import read_flag, read_number, read_optional_number
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.rope_config import parse_rope_config
from models.decoders.decoder import Decoder
from models.errors import UnsupportedModelError
from models.forward.kernel_settings import KernelSettings
from models.layers.attention import Attention
from models.layers.decoder_layers import SandwichNormLayer
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import OffsetRMSNorm
from models.layers.soft_cap import soft_cap_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(DenseConfig):
    """The config of Gemma models.

    `embedding_scale` multiplies token embeddings before the first layer. A tied head uses them
    without the scale.
    """

    embedding_scale: float
    logits_soft_cap: float | None


class Gemma2ForCausalLM(Decoder):
    """Source: arXiv:2408.00118, section 2."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GemmaConfig:
        return read_gemma2_config(hf_config)

    def __init__(self, config: GemmaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        layers = [
            SandwichNormLayer(
                attention=self.make_attention(attention, norm, dtype),
                mlp=GatedMLP(
                    config.hidden_size,
                    config.intermediate_size,
                    activation=config.hidden_act,
                    dtype=dtype,
                ),
                norm=functools.partial(norm, config.hidden_size),
            )
            for attention in config.attention
        ]
        super().__init__(
            config,
            layers=layers,
            norm=norm(config.hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
            embedding_scale=config.embedding_scale,
        )

    def make_attention(
        self,
        attention: AttentionConfig,
        norm: functools.partial[OffsetRMSNorm],
        dtype: jnp.dtype,
    ) -> Attention:
        return Attention(attention, dtype=dtype)

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return soft_cap_logits(super().compute_logits(hidden, kernels), self.config.logits_soft_cap)


def read_gemma2_config(hf_config: Mapping[str, object]) -> GemmaConfig:
    """Reads the config.json of Gemma 2, and of models with the same fields."""
    fields = read_gemma_fields(hf_config)
    max_positions = fields["max_position_embeddings"]
    soft_cap, logits_soft_cap = read_soft_caps(hf_config, 50.0, 30.0)
    full = AttentionConfig(
        **read_gemma_head_fields(hf_config),
        rope=parse_rope_config(hf_config, max_positions),
        soft_cap=soft_cap,
    )
    window = read_sliding_window(hf_config, default=4096)
    attention = attention_by_type(
        hf_config,
        [layer_idx % 2 == 0 for layer_idx in range(fields["num_layers"])],
        full=full,
        sliding=full,
        window=window,
        max_position_embeddings=max_positions,
    )
    return GemmaConfig(**fields, attention=attention, logits_soft_cap=logits_soft_cap)


def read_gemma_fields(hf_config: Mapping[str, object]) -> dict[str, object]:
    """Reads the fields of `GemmaConfig` that have the same names and defaults in all Gemmas."""
    fields = read_dense_fields(
        # transformers has these defaults. A field that is null stays None.
        {"bos_token_id": 2, "eos_token_id": 1, **hf_config},
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_tie_word_embeddings=True,
    )
    return fields | {"embedding_scale": fields["hidden_size"] ** 0.5}


def read_gemma_head_fields(hf_config: Mapping[str, object]) -> dict[str, object]:
    """Reads the fields of `AttentionConfig` that all Gemmas share.

    The scale is computed from `query_pre_attn_scalar` in place of the head size.
    """
    has_bias = read_flag(hf_config, "attention_bias")
    return {
        **read_head_fields(hf_config, default_num_kv_heads=4, default_head_dim=256),
        "scale": read_number(hf_config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "qkv_bias": has_bias,
        "out_bias": has_bias,
    }


def read_soft_caps(
    hf_config: Mapping[str, object], default_attention: float | None, default_logits: float | None
) -> tuple[float | None, float | None]:
    """Reads the soft caps of attention scores and of logits; a null in config.json is no cap."""
    defaults = {
        "attn_logit_softcapping": default_attention,
        "final_logit_softcapping": default_logits,
    }
    attention_cap, logits_cap = (
        read_optional_number({name: hf_config.get(name, default)}, name)
        for name, default in defaults.items()
    )
    return attention_cap, logits_cap


def read_logits_soft_cap(hf_config: Mapping[str, object]) -> float | None:
    """Reads the soft cap of logits, for families without a soft cap of attention scores.

    Returns:
        None if config.json has none.

    Raises:
        UnsupportedModelError: config.json has a soft cap of attention scores.
    """
    soft_cap, logits_soft_cap = read_soft_caps(hf_config, None, None)
    if soft_cap is not None:
        # transformers ignores this field, and other engines do not.
        raise UnsupportedModelError(
            f"config.json: attn_logit_softcapping={soft_cap:g} is not supported for this "
            "architecture; expected null. No release sets it."
        )
    return logits_soft_cap
