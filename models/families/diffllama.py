"""DiffLlama: Llama's layers with differential attention. Each head is the difference of two
softmaxes over the same values.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_flag, with_defaults
from models.decoders.dense_decoder import DenseDecoder
from models.layers.differential_attention import DifferentialAttention, with_paired_heads
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}


class DiffLlamaForCausalLM(DenseDecoder):
    """Source: arXiv:2410.05258, and huggingface.co/docs/transformers/model_doc/diffllama."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        return DenseConfig(
            **fields, attention=(with_paired_heads(attention),) * fields["num_layers"]
        )

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        eps = config.rms_norm_eps
        super().__init__(
            config,
            attention=functools.partial(DifferentialAttention, eps=eps, dtype=dtype),
            norm=functools.partial(RMSNorm, eps=eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
