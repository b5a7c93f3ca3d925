"""EXAONE 3 and 3.5: Llama's layers under other names."""

from collections.abc import Mapping

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, with_defaults
from models.families.llama import LlamaConfig, LlamaForCausalLM
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 361, "rope_theta": 5e5}
# Names of fields in transformers 5, and on the hub.
_OF_HUB = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".mlp.gate_proj.": ".mlp.c_fc_0.",
    ".mlp.up_proj.": ".mlp.c_fc_1.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}


class ExaoneForCausalLM(LlamaForCausalLM):
    """Source: arXiv:2408.03541."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        of_hub = {name: hf_config.get(other) for name, other in _OF_HUB.items()}
        hf_config = {
            **hf_config,
            **{name: value for name, value in of_hub.items() if value is not None},
        }
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=8,
        )
        return LlamaConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            mlp_bias=read_flag(hf_config, "mlp_bias"),
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints rename all modules."""
        return with_stored_names(super().weight_rules(), _STORED_NAMES)
