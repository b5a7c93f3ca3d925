"""Granite 4: Mamba2 in most layers, attention without positions in a few, and experts or an MLP."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.fields import read_count, with_defaults
from models.config.rope_config import parse_rope_config
from models.config.state_layers import read_has_state
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.moe_decoder import MoEDecoder
from models.families.bamba import read_bamba_mixer
from models.families.granite import read_granite_head_fields
from models.families.granite_moe import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    make_granite_experts,
    read_granite_moe_fields,
)
from models.layers.attention import Attention
from models.layers.mamba2 import MAMBA, Mamba2, Mamba2Config
from models.layers.mixer_rules import with_renamed_mixers
from models.layers.packed_weights import with_packed_gate_up
from models.layers.residual_layers import ScaledPreNormLayer
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "shared_intermediate_size": 1024}
# Modules of an MLP in layers without experts -> their names in checkpoints.
_MLP_NAMES = {".mlp.down_proj.": ".shared_mlp.output_linear.", ".mlp.": ".shared_mlp."}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeHybridConfig(GraniteMoeConfig):
    """The config of Granite 4. Layers without attention have a `Mamba2`."""

    mamba: Mamba2Config

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, MAMBA, self.mamba.format())


class GraniteMoeHybridForCausalLM(GraniteMoeForCausalLM):
    """Without experts, layers have the shared MLP alone.

    Source: huggingface.co/docs/transformers/model_doc/granitemoehybrid.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GraniteMoeHybridConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        shared_size = read_count(hf_config, "shared_intermediate_size")
        has_experts = read_count(hf_config, "num_local_experts", 8, minimum=0) > 0
        if not has_experts:
            none = {"num_local_experts": 1, "num_experts_per_tok": 1}
            hf_config = hf_config | none | {"intermediate_size": shared_size}
        fields = read_granite_moe_fields(hf_config)
        num_layers = fields["num_layers"]
        attention = AttentionConfig(
            **read_granite_head_fields(hf_config),
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
            has_positions=hf_config.get("position_embedding_type") == "rope",
        )
        layers = read_has_state(hf_config, [True] * num_layers, "mamba", "linear_attention")
        return GraniteMoeHybridConfig(
            **fields | {"has_experts": (has_experts,) * num_layers},
            attention=tuple(None if has_state else attention for has_state in layers),
            shared_intermediate_size=shared_size if has_experts else 0,
            mamba=read_bamba_mixer(hf_config, fields),
        )

    def __init__(
        self, config: GraniteMoeHybridConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return Mamba2(config.mamba, dtype=dtype)
            return Attention(attention, dtype=dtype)

        MoEDecoder.__init__(
            self,
            config,
            layer=functools.partial(ScaledPreNormLayer, residual_scale=config.residual_scale),
            attention=make_mixer,
            sparse_mlp=functools.partial(make_granite_experts, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            embedding_scale=config.embedding_scale,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for mixers and MLPs."""
        config = self.config
        if all(config.has_experts):
            rules = super().weight_rules()
        else:
            rules = with_packed_gate_up(
                MoEDecoder.weight_rules(self),
                num_layers=config.num_layers,
                intermediate_size=config.intermediate_size,
                packed="input_linear",
            )
            rules = with_stored_names(rules, _MLP_NAMES)
        return with_renamed_mixers(rules, config.attention, MAMBA)
