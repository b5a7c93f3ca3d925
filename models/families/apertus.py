"""Apertus: normed queries and keys, and an MLP with the trained activation xIELU."""

import functools
import re
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_flag, refuse_other_values, with_defaults
from models.config.rope_config import with_default_rope
from models.decoders.dense_decoder import DenseDecoder
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm
from models.layers.xielu import XieluMLP
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 12_000_000.0,
}
_DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The hub's config.json has the last three. transformers ignores them, and computes as these values
# say.
_SUPPORTED = {"hidden_act": "xielu", "qk_norm": True, "post_norm": False, "mlp_bias": False}
# The norms' names in `PreNormLayer`, and in checkpoints.
_STORED_NORMS = {
    "input_layernorm": "attention_layernorm",
    "post_attention_layernorm": "feedforward_layernorm",
}


class ApertusForCausalLM(DenseDecoder):
    """Source: arXiv:2509.14233."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        hf_config = with_default_rope(with_defaults(hf_config, _DEFAULTS), _DEFAULT_ROPE)
        refuse_other_values(hf_config, _SUPPORTED)
        # `XieluMLP` has its own activation, so the one of the config is not used.
        fields = read_dense_fields(hf_config | {"hidden_act": None})
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        return DenseConfig(**fields, attention=(attention,) * fields["num_layers"])

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            mlp=XieluMLP,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints rename the norms of each layer."""
        return with_renamed_sources(super().weight_rules(), _stored_name)


def _stored_name(name: str) -> str:
    norms = "|".join(_STORED_NORMS)
    return re.sub(rf"\b({norms})\b", lambda found: _STORED_NORMS[found[1]], name)
