"""ERNIE 4.5, dense: Llama's layers with rotary embeddings of neighboring dimensions."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, with_defaults
from models.decoders.dense_decoder import DenseDecoder
from models.families.llama import LlamaConfig
from models.layers.attention import Attention
from models.layers.rms_norm import RMSNorm
from models.layers.rotary import apply_rotary_to_neighbors

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 5e5}


class Ernie4_5ForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/ernie4_5."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config, default_tie_word_embeddings=True)
        has_bias = read_flag(hf_config, "use_bias")
        attention = read_attention(
            hf_config,
            fields,
            has_bias=has_bias,
            default_num_kv_heads=2,
            # A null means the hidden size divided by the number of heads.
            default_head_dim=None if "head_dim" in hf_config else 128,
        )
        return LlamaConfig(
            **fields, attention=(attention,) * fields["num_layers"], mlp_bias=has_bias
        )

    def __init__(self, config: LlamaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(Attention, rotate=apply_rotary_to_neighbors, dtype=dtype),
            mlp_bias=config.mlp_bias,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
