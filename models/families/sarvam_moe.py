"""Sarvam 30B: GLM-4.5's layers with rotary embeddings of whole heads."""

from collections.abc import Mapping

from models.config.fields import with_defaults, with_main_names
from models.families.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM
from models.layers.packed_weights import with_packed_qkv
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "initializer_range": 0.006,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 4,
    "num_mtp_layers": 0,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 8e6,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
# Other names of fields, of which the hub has the last three -> their names in transformers.
_MAIN_NAMES = {
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}


class SarvamMoEForCausalLM(Glm4MoeForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/sarvam_moe."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Glm4MoeConfig:
        given = with_main_names(hf_config, _MAIN_NAMES)
        return super().read_config(with_defaults(given, _DEFAULTS))

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join queries, keys and values, and have names of their own."""
        rules = with_packed_qkv(super().weight_rules(), self.config.attention)
        return with_stored_names(rules, _STORED_NAMES)
