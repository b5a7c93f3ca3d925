"""GLM-4 (2024): partial rotary embeddings of neighboring dimensions, and a packed MLP."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import read_flag, with_defaults
from models.config.partial_rotary import parse_partial_rope
from models.decoders.dense_decoder import DenseDecoder
from models.layers.attention import Attention
from models.layers.packed_weights import with_packed_gate_up
from models.layers.rms_norm import RMSNorm
from models.layers.rotary import apply_rotary_to_neighbors
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1.5625e-07}
_END_TOKENS = [151_329, 151_336, 151_338]  # of a config.json where they are null, too


class GlmForCausalLM(DenseDecoder):
    """Llama's layers. By default, half of each head is rotated.

    Source: arXiv:2406.12793.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        return read_glm_config(hf_config)

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        attention = functools.partial(Attention, rotate=apply_rotary_to_neighbors, dtype=dtype)
        super().__init__(
            config,
            attention=attention,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints pack the gate and up."""
        return with_packed_gate_up(
            super().weight_rules(),
            num_layers=self.config.num_layers,
            intermediate_size=self.config.intermediate_size,
        )


def read_glm_config(hf_config: Mapping[str, object]) -> DenseConfig:
    """Reads the config.json of GLM-4, of 2024 and of 2025."""
    hf_config = with_defaults(hf_config, _DEFAULTS)
    hf_config["eos_token_id"] = hf_config.get("eos_token_id") or _END_TOKENS
    fields = read_dense_fields(hf_config)
    head_fields = read_head_fields(hf_config, default_num_kv_heads=2, default_head_dim=128)
    max_positions = fields["max_position_embeddings"]
    rope, factor = parse_partial_rope(hf_config, max_positions, default_factor=0.5)
    attention = AttentionConfig(
        **head_fields,
        rope=rope,
        rotary_dim=int(head_fields["head_dim"] * factor),
        qkv_bias=read_flag(hf_config, "attention_bias", True),
    )
    return DenseConfig(**fields, attention=(attention,) * fields["num_layers"])
