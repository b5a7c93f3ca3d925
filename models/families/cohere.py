"""Command R, Command R+, Aya 23 and Aya Expanse: attention and the MLP in parallel, layer norms,
and a factor of logits.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_attention, read_layer_norm_fields
from models.config.fields import read_flag, read_number, with_defaults
from models.decoders.dense_decoder import DenseDecoder
from models.forward.kernel_settings import KernelSettings
from models.layers.attention import Attention
from models.layers.decoder_layers import ParallelLayer
from models.layers.layer_norm import StackedHeadLayerNorm, UnbiasedLayerNorm
from models.layers.rotary import apply_rotary_to_neighbors

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 5, "eos_token_id": 255_001, "rope_theta": 5e5}


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(LayerNormConfig):
    """The config of Command R."""

    logits_scale: float  # factor of logits
    has_head_norms: bool  # whether each head of queries and keys is normed


class CohereForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/cohere."""

    # Makes the attention of a layer. Derived families may rotate in another way.
    make_attention: ClassVar[Callable[..., Attention]] = staticmethod(
        functools.partial(Attention, rotate=apply_rotary_to_neighbors)
    )

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CohereConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_cohere_fields(hf_config)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        return CohereConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            has_head_norms=read_flag(hf_config, "use_qk_norm"),
        )

    def __init__(self, config: CohereConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(UnbiasedLayerNorm, eps=config.layer_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layer=ParallelLayer,
            attention=functools.partial(self._make_attention, config=config, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def _make_attention(
        self, attention: AttentionConfig, *, config: CohereConfig, dtype: jnp.dtype
    ) -> Attention:
        make = functools.partial(self.make_attention, attention, dtype=dtype)
        if not config.has_head_norms:
            return make()
        norm = functools.partial(
            StackedHeadLayerNorm,
            head_dim=attention.head_dim,
            eps=config.layer_norm_eps,
            dtype=dtype,
        )
        return make(q_norm=norm(attention.num_q_heads), k_norm=norm(attention.num_kv_heads))

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden, kernels) * self.config.logits_scale


def read_cohere_fields(hf_config: Mapping[str, object]) -> dict[str, object]:
    """Reads the fields of `CohereConfig` except `attention` and `has_head_norms`."""
    fields = read_layer_norm_fields(hf_config, default_tie_word_embeddings=True)
    return fields | {"logits_scale": read_number(hf_config, "logit_scale", 0.0625)}
