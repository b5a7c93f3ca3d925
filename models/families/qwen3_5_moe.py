"""Qwen3.5 with experts: Qwen3-Next's layers, with experts that are stored together. The layer for
multi-token prediction makes drafts with the method `mtp`.
"""

from collections.abc import Mapping

from models.config.fields import read_count, with_defaults
from models.decoders.moe_decoder import MoEDecoder
from models.families.qwen3_5 import join_separate_projections
from models.families.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM, mixer_rules
from models.layers.experts import packed_or_single_rules
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8}


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    """All layers have experts, and the weights of the chosen experts are scaled to a sum of 1.

    Source: huggingface.co/docs/transformers/model_doc/qwen3_5_moe.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Qwen3NextConfig:
        given = {
            # No layer has an MLP of this width.
            "intermediate_size": read_count(hf_config, "moe_intermediate_size", 512),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
        return super().read_config(with_defaults(hf_config, _DEFAULTS) | given)

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints may join all experts of a layer, and have four matrices for a mixer."""
        rules = MoEDecoder.weight_rules(self)
        return packed_or_single_rules(mixer_rules(rules, self.config, join_separate_projections))
