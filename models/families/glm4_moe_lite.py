"""GLM-4.7-Flash: DeepSeek V3 with other defaults."""

import dataclasses
from collections.abc import Mapping

from models.config.fields import with_defaults
from models.config.moe_config import read_mlp_layer_types
from models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "num_experts_per_tok": 4,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
}
_DEFAULT_NUM_EXPERTS = 64


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/glm4_moe_lite."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DeepseekV3Config:
        num_experts = hf_config.get("num_local_experts") or _DEFAULT_NUM_EXPERTS
        given = with_defaults(hf_config, {**_DEFAULTS, "n_routed_experts": num_experts})
        # A null means that queries have no latent.
        config = super().read_config({"q_lora_rank": 768, **given})
        has_experts = read_mlp_layer_types(hf_config, config.has_experts)
        return dataclasses.replace(config, has_experts=has_experts)
