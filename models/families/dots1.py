"""dots.llm1: Qwen3's attention, and experts as in DeepSeek-V3."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_count, read_flag, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import read_corrected_choice, read_expert_fields, read_leading_dense
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"norm_topk_prob": False}


class Dots1ForCausalLM(MoEDecoder):
    """Source: arXiv:2506.05767."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CorrectedMoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        num_layers = fields["num_layers"]
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=32,
        )
        window = read_sliding_window(hf_config, default=4096)
        num_full = read_count(hf_config, "max_window_layers", 62, minimum=0)
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_size=1408,
        )
        num_shared = read_count(hf_config, "n_shared_experts")
        return CorrectedMoEConfig(
            **fields,
            **experts,
            attention=attention_by_type(
                hf_config,
                [window is not None and layer_idx >= num_full for layer_idx in range(num_layers)],
                full=attention,
                sliding=attention,
                window=window,
                max_position_embeddings=fields["max_position_embeddings"],
            ),
            has_experts=read_leading_dense(hf_config, num_layers, default=0),
            choose=read_corrected_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
        )

    def __init__(
        self, config: CorrectedMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
