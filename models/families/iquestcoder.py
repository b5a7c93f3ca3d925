"""IQuest-Coder: Llama's layers."""

from collections.abc import Mapping

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, refuse_other_values, with_defaults
from models.families.llama import LlamaConfig, LlamaForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
# transformers refuses other values, too.
_SUPPORTED = {"clip_qkv": None, "use_sliding_window": False}


class IQuestCoderForCausalLM(LlamaForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/iquestcoder."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=8,
            # A null means the hidden size divided by the number of heads.
            default_head_dim=None if "head_dim" in hf_config else 128,
        )
        return LlamaConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            mlp_bias=read_flag(hf_config, "mlp_bias"),
        )
