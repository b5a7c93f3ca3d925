"""Granite with experts and sliding windows: attention sinks, and a rotary base per layer."""

from collections.abc import Mapping
from typing import ClassVar

from models.config.fields import with_defaults
from models.families.granite_moe import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    read_granite_moe_fields,
    read_shared_size,
)
from models.families.granite_swa import read_granite_swa_attention

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2}


class GraniteMoeSWAForCausalLM(GraniteMoeForCausalLM):
    """By default, every fourth layer is full, from the first one on."""

    stored_names: ClassVar[Mapping[str, str]] = {
        ".mlp.experts.": ".block_sparse_moe.experts.",
        ".mlp.gate.": ".block_sparse_moe.router.",
        ".mlp.shared_experts.down_proj.": ".shared_mlp.output_linear.",
        ".mlp.shared_experts.": ".shared_mlp.",
    }

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GraniteMoeConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_granite_moe_fields(hf_config)
        return GraniteMoeConfig(
            **fields,
            attention=read_granite_swa_attention(hf_config, fields),
            shared_intermediate_size=read_shared_size(hf_config),
        )
