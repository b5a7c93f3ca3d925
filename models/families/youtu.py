"""Youtu-LLM: Llama's layers with the latent attention of DeepSeek V3."""

import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import DenseConfig, read_dense_fields
from models.config.fields import read_count, with_defaults
from models.config.latent_config import read_latent_attention, read_turns_neighbors
from models.decoders.dense_decoder import DenseDecoder
from models.layers.latent_attention import LatentAttention
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 128_000, "eos_token_id": 128_001}


class YoutuForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/youtu."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        initializer_range = 2 / math.sqrt(5 * read_count(hf_config, "hidden_size"))
        hf_config = with_defaults(hf_config, _DEFAULTS | {"initializer_range": initializer_range})
        fields = read_dense_fields(hf_config, default_tie_word_embeddings=True)
        attention = read_latent_attention(
            hf_config,
            fields["max_position_embeddings"],
            default_q_latent_dim=1536,
            turns_neighbors=read_turns_neighbors(hf_config),
        )
        return DenseConfig(**fields, attention=(attention,) * fields["num_layers"])

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            attention=functools.partial(LatentAttention, dtype=dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
