"""`QwenMTPHead`: the layer for multi-token prediction of Qwen3-Next and Qwen3.5.

Source: the tensors `mtp.*` of Qwen3-Next-80B-A3B and Qwen3.5, and vLLM
`model_executor/models/qwen3_next_mtp.py`.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from models.config.model_config import ModelConfig
from models.drafters.mtp_head import MTPHead, one_layer
from models.families.qwen3_next import rules_of_gated_attention
from models.layers.experts import packed_or_single_rules
from models.layers.rms_norm import OffsetRMSNorm
from models.weight_rule import WeightRule, rules_of_layers, with_renamed_sources

# Start of a parameter's name in the head -> the start after `mtp.` in checkpoints.
_STORED_NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "layer.": "layers.0.",
}


class QwenMTPHead(MTPHead):
    """An `MTPHead` with other names of tensors. Its layer has attention, and never a state.

    The config.json of Qwen3-Next does not mention the layer, so only the tensors show whether a
    checkpoint has it.
    """

    norm_class: ClassVar[type[nnx.Module]] = OffsetRMSNorm

    def __init__(self, config: ModelConfig, *, prefix: str, dtype: jnp.dtype) -> None:
        super().__init__(config, prefix=prefix, dtype=dtype)
        self.head_dim = config.attention[0].head_dim

    @classmethod
    def prefix_of(cls, target: ModelConfig) -> str:
        return "mtp."

    @classmethod
    def config_of(cls, target: ModelConfig) -> ModelConfig:
        return one_layer(target)

    def weight_rules(self) -> Mapping[str, WeightRule]:
        def rename(name: str) -> str:
            for own, stored in _STORED_NAMES.items():
                if name.startswith(own):
                    return f"{self.prefix}{stored}{name.removeprefix(own)}"
            return f"{self.prefix}{name}"

        rules = rules_of_layers(self, prefix="")
        rules |= rules_of_gated_attention(rules, "layer.self_attn.", self.head_dim)
        return with_renamed_sources(packed_or_single_rules(rules), rename)

    def ignores_weight(self, name: str) -> bool:
        """All tensors of the target."""
        return not name.startswith(self.prefix)

    def name_weight(self, name: str) -> str:
        """Renames tensors of the target: `model.norm.weight` would be read as `mtp.norm.weight`."""
        return name if name.startswith(self.prefix) else f"target.{name}"
