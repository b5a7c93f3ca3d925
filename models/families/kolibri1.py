"""Kolibri 1: GLM-4-0414's norms, and experts that are ranked by their scores plus corrections."""

import dataclasses
import functools
import re
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_count, read_flag
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.moe_config import read_expert_fields
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.layers.decoder_layers import SandwichNormLayer
from models.layers.dense_layers import make_head_normed_attention
from models.layers.rms_norm import RMSNorm
from models.layers.routing_rules import CorrectedScoresTopK
from models.weight_rule import WeightRule, with_renamed_sources

# The names in this model, and in checkpoints.
_STORED_NAMES = {
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_ffn_norm",
    "mlp.gate.e_score_correction_bias": "moe.router.expert_bias",
}


class Kolibri1ForCausalLM(MoEDecoder):
    """If the model has a window, full layers have no positions. By default, every fifth is full.

    Source: huggingface.co/Aleph-Alpha/Kolibri-1.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CorrectedMoEConfig:
        experts = read_expert_fields(
            hf_config, default_num_experts=384, default_top_k=6, default_size=512
        )
        # No layer has an MLP without experts, and config.json has no size for one.
        sizes = {"intermediate_size": experts["moe_intermediate_size"]}
        fields = read_dense_fields({**hf_config, **sizes})
        sliding = read_attention(hf_config, fields, default_num_kv_heads=4, default_head_dim=128)
        window = read_sliding_window(hf_config, default=513)
        num_layers = fields["num_layers"]
        return CorrectedMoEConfig(
            **fields,
            **experts,
            attention=attention_by_type(
                hf_config,
                [(layer_idx + 1) % 5 != 0 for layer_idx in range(num_layers)],
                full=dataclasses.replace(sliding, has_positions=window is None),
                sliding=sliding,
                window=window,
                max_position_embeddings=fields["max_position_embeddings"],
            ),
            has_experts=(True,) * num_layers,
            choose=CorrectedScoresTopK(
                top_k=experts["num_experts_per_tok"],
                normalizes=read_flag(hf_config, "norm_topk_prob"),
            ),
            shared_intermediate_size=read_count(hf_config, "shared_expert_intermediate_size", 512),
        )

    def __init__(
        self, config: CorrectedMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layer=SandwichNormLayer,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints rename the norms and the corrections."""
        return with_renamed_sources(super().weight_rules(), _stored_name)


def _stored_name(name: str) -> str:
    names = "|".join(map(re.escape, _STORED_NAMES))
    return re.sub(rf"\b({names})\b", lambda found: _STORED_NAMES[found[1]], name)
