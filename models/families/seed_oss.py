"""Seed-OSS: Llama's layers with biases on queries, keys and values."""

from collections.abc import Mapping

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_flag, with_defaults
from models.config.rope_config import parse_rope_config
from models.families.llama import LlamaConfig, LlamaForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 2}


class SeedOssForCausalLM(LlamaForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/seed_oss."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        attention = AttentionConfig(
            **read_head_fields(
                hf_config,
                default_num_kv_heads=8,
                # A null means the hidden size divided by the number of heads.
                default_head_dim=None if "head_dim" in hf_config else 128,
            ),
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
            qkv_bias=read_flag(hf_config, "attention_bias", True),
            out_bias=read_flag(hf_config, "attention_out_bias"),
        )
        return LlamaConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            mlp_bias=read_flag(hf_config, "mlp_bias"),
        )
