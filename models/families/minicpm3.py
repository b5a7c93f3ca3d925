"""MiniCPM3: latent attention, and factors of embeddings, of the outputs of layers and of logits."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.config.dense_config import DenseConfig, read_dense_fields
from models.config.fields import read_count, read_flag, read_number, with_defaults
from models.config.latent_config import read_latent_attention
from models.decoders.dense_decoder import DenseDecoder
from models.forward.kernel_settings import KernelSettings
from models.layers.latent_attention import LatentAttention
from models.layers.residual_layers import ScaledPreNormLayer
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out or set to null.
_DEFAULTS = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-5,
    "scale_emb": 12,
}
# Defaults of fields that a config.json may leave out. A null turns the scaling off.
_DEFAULT_SCALES = {"scale_depth": 1.4, "dim_model_base": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPM3Config(DenseConfig):
    """The config of MiniCPM3."""

    embedding_scale: float  # factor of token embeddings
    residual_scale: float  # factor of the outputs of attention and of the MLP
    logits_divisor: float  # hidden states are divided by it before the vocabulary head
    mlp_bias: bool


class MiniCPM3ForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/minicpm3."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MiniCPM3Config:
        hf_config = {**_DEFAULT_SCALES, **with_defaults(hf_config, _DEFAULTS)}
        fields = read_dense_fields(hf_config, default_tie_word_embeddings=True)
        hidden_size, root = fields["hidden_size"], math.sqrt(fields["num_layers"])
        num_heads = read_count(hf_config, "num_attention_heads")
        attention = read_latent_attention(
            with_defaults(hf_config, {"v_head_dim": hidden_size // num_heads}),
            fields["max_position_embeddings"],
            default_q_latent_dim=768,
            turns_neighbors=False,
        )
        return MiniCPM3Config(
            **fields,
            attention=(attention,) * fields["num_layers"],
            embedding_scale=read_number(hf_config, "scale_emb"),
            residual_scale=read_number(hf_config, "scale_depth", root) / root,
            logits_divisor=hidden_size / read_count(hf_config, "dim_model_base", hidden_size),
            mlp_bias=read_flag(hf_config, "mlp_bias"),
        )

    def __init__(self, config: MiniCPM3Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            layer=functools.partial(ScaledPreNormLayer, residual_scale=config.residual_scale),
            attention=functools.partial(LatentAttention, dtype=dtype),
            mlp_bias=config.mlp_bias,
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            embedding_scale=config.embedding_scale,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden / self.config.logits_divisor, kernels)
