"""GLM-4-0414 and GLM-Z1: partial rotary embeddings, a packed MLP, and norms on both sides of each
part.
"""

import functools
import re
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import DenseConfig
from models.decoders.dense_decoder import DenseDecoder
from models.families.glm import read_glm_config
from models.layers.attention import Attention
from models.layers.decoder_layers import SandwichNormLayer
from models.layers.packed_weights import with_packed_gate_up
from models.layers.rms_norm import RMSNorm
from models.layers.rotary import apply_rotary_to_neighbors
from models.weight_rule import WeightRule, with_renamed_sources

# The norms' names in `SandwichNormLayer`, and in checkpoints.
_STORED_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


class Glm4ForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/glm4."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        return read_glm_config(hf_config)

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layer=SandwichNormLayer,
            attention=functools.partial(Attention, rotate=apply_rotary_to_neighbors, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints rename the norms, and pack the gate and up."""
        rules = with_packed_gate_up(
            super().weight_rules(),
            num_layers=self.config.num_layers,
            intermediate_size=self.config.intermediate_size,
        )
        return with_renamed_sources(rules, _stored_name)


def _stored_name(name: str) -> str:
    norms = "|".join(_STORED_NORMS)
    return re.sub(rf"\b({norms})\b", lambda found: _STORED_NORMS[found[1]], name)
