"""Helium: Llama's layers with rotary embeddings of neighboring dimensions."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_flag, with_defaults
from models.config.rope_config import parse_rope_config
from models.decoders.dense_decoder import DenseDecoder
from models.families.llama import LlamaConfig
from models.layers.attention import Attention
from models.layers.rms_norm import RoundedLastRMSNorm
from models.layers.rotary import apply_rotary_to_neighbors

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-8, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 1e5}


class HeliumForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/helium."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        attention = AttentionConfig(
            **read_head_fields(hf_config, default_num_kv_heads=20, default_head_dim=128),
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
            qkv_bias=read_flag(hf_config, "attention_bias"),
        )
        return LlamaConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            mlp_bias=read_flag(hf_config, "mlp_bias"),
        )

    def __init__(self, config: LlamaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RoundedLastRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(Attention, rotate=apply_rotary_to_neighbors, dtype=dtype),
            mlp_bias=config.mlp_bias,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
