"""CWM: Llama's layers, three with a sliding window to one full layer."""

from collections.abc import Mapping

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.rope_config import with_default_rope
from models.families.llama import LlamaConfig, LlamaForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 128_000, "rope_theta": 1e6}
_END_TOKENS = [128_001, 128_008, 128_009]  # of a config.json where they are null, too
_DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class CwmForCausalLM(LlamaForCausalLM):
    """By default, every fourth layer is full, from the first one on.

    Source: arXiv:2510.02387.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        hf_config = with_default_rope(with_defaults(hf_config, _DEFAULTS), _DEFAULT_ROPE)
        if hf_config.get("eos_token_id") is None:
            hf_config["eos_token_id"] = _END_TOKENS
        fields = read_dense_fields(hf_config)
        max_positions = fields["max_position_embeddings"]
        full = read_attention(hf_config, fields, default_num_kv_heads=8, default_head_dim=128)
        attention = attention_by_type(
            hf_config,
            [layer_idx % 4 != 0 for layer_idx in range(fields["num_layers"])],
            full=full,
            sliding=full,
            window=read_sliding_window(hf_config, default=8192),
            max_position_embeddings=max_positions,
        )
        return LlamaConfig(**fields, attention=attention, mlp_bias=read_flag(hf_config, "mlp_bias"))
