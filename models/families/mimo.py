"""MiMo 7B: Qwen2's layers. The layer for multi-token prediction makes drafts with the method
`mtp`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from models.config.mtp_layers import read_num_mtp_layers
from models.families.llama import LlamaConfig
from models.families.qwen2 import Qwen2ForCausalLM

# The names of tensors of layers for multi-token prediction start with this.
MTP_LAYERS = "model.mtp_layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class MiMoConfig(LlamaConfig):
    """The config of MiMo models."""

    num_mtp_layers: int


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Source: `modeling_mimo.py` of XiaomiMiMo/MiMo-7B-Base on the hub."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MiMoConfig:
        config = super().read_config(hf_config)
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return MiMoConfig(**fields, num_mtp_layers=read_num_mtp_layers(hf_config, default=0))

    def ignores_weight(self, name: str) -> bool:
        return name.startswith(MTP_LAYERS)
