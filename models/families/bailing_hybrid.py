"""Ling 3: Kimi Linear with gated latent attention that has positions, and bounded decays."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, read_flag, with_defaults, with_main_names
from models.config.latent_config import read_latent_attention
from models.config.moe_config import (
    read_corrected_choice,
    read_expert_fields,
    read_leading_dense,
    read_mlp_layer_types,
)
from models.config.mtp_layers import is_of_mtp_layer, read_num_mtp_layers
from models.config.state_layers import read_has_state
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.errors import ModelConfigError
from models.families.kimi_linear import MAIN_NAMES
from models.layers.gated_latent_attention import HeadGatedLatentAttention
from models.layers.kimi_delta_attention import DELTA_ATTENTION, KimiDeltaAttention, KimiDeltaConfig
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import SelfAttention

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "eos_token_id": 156_895,
    "max_position_embeddings": 262_144,
    "n_group": 8,
    "rope_theta": 6_000_000.0,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
# Names of tensors on the hub -> names here.
_OWN_NAMES = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BailingHybridConfig(CorrectedMoEConfig):
    """The config of Ling 3. Layers without attention have a `KimiDeltaAttention`."""

    linear: KimiDeltaConfig
    num_mtp_layers: int

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, DELTA_ATTENTION, self.linear.format())


class BailingHybridForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/bailing_hybrid."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> BailingHybridConfig:
        hf_config = with_defaults(with_main_names(hf_config, MAIN_NAMES), _DEFAULTS)
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config, default_num_experts=512, default_top_k=8, default_size=768
        )
        num_layers = fields["num_layers"]
        attention = read_latent_attention(
            hf_config, fields["max_position_embeddings"], default_q_latent_dim=None
        )
        group_size = read_count(hf_config, "layer_group_size", 6)
        by_rule = [(layer_idx + 1) % group_size != 0 for layer_idx in range(num_layers)]
        leading_dense = read_leading_dense(hf_config, num_layers, default=2)
        num_shared = read_count(hf_config, "n_shared_experts", 1)
        return BailingHybridConfig(
            **fields,
            **experts,
            attention=tuple(
                None if has_state else attention
                for has_state in read_has_state(hf_config, by_rule, "linear_attention")
            ),
            has_experts=read_mlp_layer_types(hf_config, leading_dense),
            choose=read_corrected_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
            linear=_read_linear(hf_config, fields["rms_norm_eps"]),
            num_mtp_layers=read_num_mtp_layers(hf_config, default=1),
        )

    def __init__(
        self, config: BailingHybridConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return KimiDeltaAttention(config.linear, dtype=dtype)
            return HeadGatedLatentAttention(attention, dtype=dtype)

        super().__init__(
            config,
            attention=make_mixer,
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def name_weight(self, name: str) -> str:
        """The hub has other names for embeddings, mixers and corrections."""
        for stored, own in _OWN_NAMES.items():
            name = name.replace(stored, own)
        return name

    def ignores_weight(self, name: str) -> bool:
        return is_of_mtp_layer(
            name, num_layers=self.config.num_layers, num_mtp_layers=self.config.num_mtp_layers
        )


def _read_linear(hf_config: Mapping[str, object], eps: float) -> KimiDeltaConfig:
    # Files that transformers writes have fields that begin with `linear_`. In them, `head_dim` is
    # the width of attention's heads.
    num_heads = read_count(hf_config, "num_attention_heads")
    head_dim = read_count(hf_config, "head_dim", 128)
    kernel_size = read_count(hf_config, "short_conv_kernel_size", 4)
    return KimiDeltaConfig(
        hidden_size=read_count(hf_config, "hidden_size"),
        num_heads=read_count(hf_config, "linear_num_heads", num_heads),
        head_dim=read_count(hf_config, "linear_head_dim", head_dim),
        kernel_size=read_count(hf_config, "linear_conv_kernel_dim", kernel_size),
        eps=eps,
        has_inner_vectors=False,
        min_log_decay=_read_min_log_decay(hf_config),
    )


def _read_min_log_decay(hf_config: Mapping[str, object]) -> float | None:
    """The lower bound of the logarithms of decays; None if `kda_safe_gate` is false."""
    if not read_flag(hf_config, "kda_safe_gate", True):
        return None
    bound = hf_config.get("kda_lower_bound")
    bound = -5.0 if bound is None else bound
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not bound < 0:
        raise ModelConfigError(
            f"config.json: kda_lower_bound is {bound!r}; expected a negative number."
        )
    return float(bound)
