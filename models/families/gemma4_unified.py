"""Gemma 4 12B (text): dense Gemma 4 without embeddings per layer."""

from collections.abc import Mapping

from models.config.fields import with_defaults
from models.families.gemma4 import Gemma4Config, Gemma4ForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"max_position_embeddings": 262_144, "sliding_window": 1024}
# What the architecture does not have.
_ABSENT = {"enable_moe_block": False, "hidden_size_per_layer_input": 0}


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/gemma4_unified."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Gemma4Config:
        fields = with_defaults(hf_config, _DEFAULTS) | _ABSENT
        # "vision", the default, lets only the tokens of an image see later tokens.
        if fields.get("use_bidirectional_attention") == "vision":
            fields["use_bidirectional_attention"] = None
        return super().read_config(fields)
