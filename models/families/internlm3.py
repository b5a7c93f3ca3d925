"""InternLM3: Llama's layers, with biases under another name."""

from collections.abc import Mapping

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, refuse_other_values, with_defaults
from models.families.llama import LlamaConfig, LlamaForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
# Names of the hub, and of transformers 5.
_BIASES = ("qkv_bias", "bias", "attention_bias", "mlp_bias")


class InternLM3ForCausalLM(LlamaForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/internlm3."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        has_bias = any(read_flag(hf_config, name) for name in _BIASES)
        # All projections have biases, or none has.
        refuse_other_values(hf_config, dict.fromkeys(_BIASES, has_bias))
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config,
            fields,
            has_bias=has_bias,
            default_num_kv_heads=2,
            # A null means the hidden size divided by the number of heads.
            default_head_dim=None if "head_dim" in hf_config else 128,
        )
        return LlamaConfig(
            **fields, attention=(attention,) * fields["num_layers"], mlp_bias=has_bias
        )
