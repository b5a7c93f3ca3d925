"""StableLM 3B and StableLM 2: layer norms, and partial rotary embeddings."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import Activation, read_activation, read_head_fields
from models.config.fields import read_count, read_flag, read_number
from models.config.model_config import ModelConfig, read_model_fields
from models.config.partial_rotary import parse_partial_rope
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError
from models.layers.attention import Attention
from models.layers.decoder_layers import ParallelLayer, PreNormLayer
from models.layers.layer_norm import HeadLayerNorm, LayerNorm
from models.layers.mlp import GatedMLP
from models.weight_rule import WeightRule, with_renamed_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmConfig(ModelConfig):
    """The config of StableLM.

    Some releases norm each head of queries and keys (`has_head_norms`). Some run attention and the
    MLP in parallel (`has_parallel_residual`).
    """

    intermediate_size: int
    hidden_act: Activation
    layer_norm_eps: float
    has_head_norms: bool
    has_parallel_residual: bool


class StableLmForCausalLM(Decoder):
    """Llama's layers with layer norms. By default, a quarter of each head is rotated."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> StableLmConfig:
        # transformers has these defaults. A field that is null stays None.
        fields = read_model_fields({"bos_token_id": 0, "eos_token_id": 0, **hf_config})
        attention = _read_attention(hf_config, fields["max_position_embeddings"])
        return StableLmConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            intermediate_size=read_count(hf_config, "intermediate_size"),
            hidden_act=read_activation(hf_config, "hidden_act", "silu"),
            layer_norm_eps=read_number(hf_config, "layer_norm_eps", 1e-5),
            has_head_norms=read_flag(hf_config, "qk_layernorm"),
            has_parallel_residual=read_flag(hf_config, "use_parallel_residual"),
        )

    def __init__(self, config: StableLmConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        eps = config.layer_norm_eps
        norm = functools.partial(LayerNorm, config.hidden_size, eps=eps, dtype=dtype)
        layer_class = ParallelLayer if config.has_parallel_residual else PreNormLayer
        layers = [
            layer_class(
                attention=_make_attention(attention, config, dtype),
                mlp=GatedMLP(
                    config.hidden_size,
                    config.intermediate_size,
                    activation=config.hidden_act,
                    dtype=dtype,
                ),
                norm=norm,
            )
            for attention in config.attention
        ]
        super().__init__(
            config, layers=layers, norm=norm(), has_head_kernel=has_head_kernel, dtype=dtype
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints call the norms of heads q_layernorm and k_layernorm."""
        return with_renamed_sources(super().weight_rules(), _stored_name)


def _read_attention(hf_config: Mapping[str, object], max_positions: int) -> AttentionConfig:
    head_fields = read_head_fields(hf_config, default_num_kv_heads=32)
    num_heads, head_dim = head_fields["num_q_heads"], head_fields["head_dim"]
    if num_heads * head_dim != head_fields["hidden_size"]:
        raise ModelConfigError(
            f"config.json: num_attention_heads={num_heads} heads of {head_dim} dimensions do not "
            f"fill hidden_size={head_fields['hidden_size']}; expected heads that fill it."
        )
    rope, factor = parse_partial_rope(hf_config, max_positions, default_factor=0.25)
    return AttentionConfig(
        **head_fields,
        rope=rope,
        rotary_dim=int(head_dim * factor),
        qkv_bias=read_flag(hf_config, "use_qkv_bias"),
    )


def _make_attention(
    attention: AttentionConfig, config: StableLmConfig, dtype: jnp.dtype
) -> Attention:
    if not config.has_head_norms:
        return Attention(attention, dtype=dtype)
    norm = functools.partial(
        HeadLayerNorm, head_dim=attention.head_dim, eps=config.layer_norm_eps, dtype=dtype
    )
    return Attention(
        attention,
        q_norm=norm(attention.num_q_heads),
        k_norm=norm(attention.num_kv_heads),
        dtype=dtype,
    )


def _stored_name(name: str) -> str:
    return re.sub(r"\.self_attn\.([qk])_norm\.", r".self_attn.\1_layernorm.", name)
