"""Qwen3-VL with experts, its language model: Qwen3 with experts that are stored together."""

from collections.abc import Mapping

from models.config.fields import with_defaults
from models.decoders.softmax_moe import SoftmaxMoEConfig
from models.families.qwen3_moe import Qwen3MoeForCausalLM
from models.layers.experts import packed_gate_up_rules
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
}


class Qwen3VLMoeForCausalLM(Qwen3MoeForCausalLM):
    """The weights of the chosen experts are always scaled to a sum of 1.

    Source: arXiv:2511.21631.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> SoftmaxMoEConfig:
        defaults = {**_DEFAULTS, "num_experts": hf_config.get("num_local_experts") or 60}
        return super().read_config(with_defaults(hf_config, defaults) | {"norm_topk_prob": True})

    def weight_rules(self) -> dict[str, WeightRule]:
        """The hub joins all experts of a layer, as [num_experts, in, out]."""
        return packed_gate_up_rules(super().weight_rules(), is_turned=True)
