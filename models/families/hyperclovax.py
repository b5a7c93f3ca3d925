"""HyperCLOVA X SEED Think: Granite's layers, with norms after attention and after the MLP."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_head_fields
from models.config.fields import read_flag, read_number, with_defaults
from models.config.rope_config import parse_rope_config
from models.decoders.dense_decoder import DenseDecoder
from models.families.granite import GraniteConfig, read_granite_fields
from models.forward.kernel_settings import KernelSettings
from models.layers.residual_layers import ScaledPreNormLayer, ScaledSandwichNormLayer
from models.layers.rms_norm import RMSNorm
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2}
# The norms' names in `SandwichNormLayer`, and in checkpoints.
_STORED_NORMS = {
    "post_attention_layernorm": "post_norm1",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_norm2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperCLOVAXConfig(GraniteConfig):
    """The config of HyperCLOVA X."""

    has_post_norms: bool  # whether the outputs of attention and of the MLP are normed


class HyperCLOVAXForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/hyperclovax."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> HyperCLOVAXConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_granite_fields(hf_config)
        # Granite divides logits by this number, and HyperCLOVA X multiplies them by it.
        fields["logits_scale"] = read_number(hf_config, "logits_scaling", 1.0)
        head_fields = read_head_fields(hf_config)
        scale = read_number(hf_config, "attention_multiplier", head_fields["scale"])
        has_bias = read_flag(hf_config, "attention_bias")
        attention = AttentionConfig(
            **head_fields | {"scale": scale},
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        return HyperCLOVAXConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            has_post_norms=read_flag(hf_config, "use_post_norm", True),
        )

    def __init__(
        self, config: HyperCLOVAXConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        layer = ScaledSandwichNormLayer if config.has_post_norms else ScaledPreNormLayer
        super().__init__(
            config,
            layer=functools.partial(layer, residual_scale=config.residual_scale),
            mlp_bias=config.mlp_bias,
            norm=norm,
            embedding_scale=config.embedding_scale,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints rename the norms, if the outputs are normed."""
        rules = super().weight_rules()
        return with_renamed_sources(rules, _stored_name) if self.config.has_post_norms else rules

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden, kernels) * self.config.logits_scale


def _stored_name(name: str) -> str:
    norms = "|".join(_STORED_NORMS)
    return re.sub(rf"\b({norms})\b", lambda found: _STORED_NORMS[found[1]], name)
