"""Solar Open: Llama's attention, and experts as in DeepSeek-V3 in every layer."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, refuse_other_values, with_defaults
from models.config.moe_config import read_corrected_choice, read_expert_fields
from models.config.rope_config import parse_rope_config
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out. No layer uses intermediate_size.
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "intermediate_size": 1280}
# The hub's config.json has these; transformers computes these values, whatever they say.
_SUPPORTED = {"first_k_dense_replace": 0, "use_qk_norm": False}


class SolarOpenForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/solar_open."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CorrectedMoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        attention = AttentionConfig(
            **read_head_fields(hf_config, default_num_kv_heads=8, default_head_dim=128),
            rope=parse_rope_config(hf_config, fields["max_position_embeddings"]),
            qkv_bias=read_flag(hf_config, "attention_bias"),
        )
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_num_experts=128,
            default_top_k=8,
            default_size=1280,
        )
        num_shared = read_count(hf_config, "n_shared_experts", 1)
        return CorrectedMoEConfig(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=(True,) * fields["num_layers"],
            choose=read_corrected_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
        )

    def __init__(
        self, config: CorrectedMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
