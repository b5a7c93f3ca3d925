"""`MiMoMTPHead`: the layer for multi-token prediction of MiMo.

Source: `modeling_mimo.py` of XiaomiMiMo/MiMo-7B-Base on the hub, and vLLM
`model_executor/models/mimo.py` and `mimo_mtp.py`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.config.model_config import ModelConfig
from models.drafters.mtp_head import MTPHead
from models.families.mimo import MTP_LAYERS
from models.weight_rule import WeightRule, rules_of_layers, with_renamed_sources

# Start of a parameter's name in the head -> what checkpoints have in its place, after
# `model.mtp_layers.0.`.
_STORED_NAMES = {
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "eh_proj.": "input_proj.",
    "norm.": "final_layernorm.",
    "layer.": "",
}


class MiMoMTPHead(MTPHead):
    """An `MTPHead` that reads the target's hidden states before the last norm.

    For further drafts, it reads its own hidden states after `final_layernorm`. vLLM replaces the
    embedding at position 0 by zeros. The published code does not, and neither does this class.
    """

    @classmethod
    def prefix_of(cls, target: ModelConfig) -> str:
        return f"{MTP_LAYERS}0."

    @classmethod
    def taps_of(cls, target: ModelConfig) -> tuple[int, ...]:
        return (target.num_layers - 1,)

    def join(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        return jnp.concatenate([self.hnorm(hidden), self.enorm(embedded)], axis=-1)

    def weight_rules(self) -> Mapping[str, WeightRule]:
        def rename(name: str) -> str:
            own = next(start for start in _STORED_NAMES if name.startswith(start))
            return f"{self.prefix}{_STORED_NAMES[own]}{name.removeprefix(own)}"

        return with_renamed_sources(rules_of_layers(self, prefix=""), rename)

    def ignores_weight(self, name: str) -> bool:
        """Ignores the tensors of the target, and of further layers for multi-token prediction."""
        return not name.startswith(self.prefix)
