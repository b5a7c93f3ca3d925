"""SantaCoder and StarCoder 1: GPT-2 with one key and one value for all query heads."""

from collections.abc import Mapping

from models.config.dense_config import LayerNormConfig
from models.config.fields import read_flag, refuse_other_values, with_defaults
from models.config.gpt_fields import with_later_names
from models.decoders.learned_positions import LearnedPositionsDecoder
from models.families.gpt2 import (
    STORED_NAMES,
    GPT2LMHeadModel,
    read_gpt2_attention,
    read_gpt2_fields,
)
from models.layers.packed_weights import with_grouped_qkv
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 50256, "eos_token_id": 50256}


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """Source: arXiv:2301.03988."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LayerNormConfig:
        hf_config = with_defaults(with_later_names(hf_config), _DEFAULTS)
        refuse_other_values(hf_config, {"add_cross_attention": False})
        fields = read_gpt2_fields(hf_config)
        num_kv_heads = 1 if read_flag(hf_config, "multi_query", True) else None
        attention = read_gpt2_attention(hf_config, num_kv_heads=num_kv_heads)
        return LayerNormConfig(**fields, attention=(attention,) * fields["num_layers"])

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join queries, keys and values, head by head."""
        rules = LearnedPositionsDecoder.weight_rules(self)
        rules = with_grouped_qkv(rules, self.config.attention, packed="self_attn.qkv_proj")
        return with_stored_names(rules, STORED_NAMES)
