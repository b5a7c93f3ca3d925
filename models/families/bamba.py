"""Bamba: Mamba2 in most layers and attention in a few, and an MLP in all."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import (
    read_count,
    read_flag,
    read_layer_numbers,
    refuse_other_values,
    with_defaults,
)
from models.config.partial_rotary import parse_partial_rope
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.decoder import Decoder
from models.layers.attention import Attention
from models.layers.dense_layers import make_dense_layers
from models.layers.mamba2 import (
    MAMBA,
    Mamba2,
    Mamba2Config,
    check_width,
    read_time_step_limit,
)
from models.layers.mixer_rules import with_renamed_mixers
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(DenseConfig):
    """The config of Bamba. Layers without attention have a `Mamba2`."""

    mamba: Mamba2Config

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, MAMBA, self.mamba.format())


class BambaForCausalLM(Decoder):
    """Source: huggingface.co/docs/transformers/model_doc/bamba."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> BambaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, {"mlp_bias": False})
        fields = read_dense_fields(hf_config)
        heads = read_head_fields(hf_config, default_num_kv_heads=8)
        # transformers computes half of each head, whatever the factor in config.json is.
        rope, _ = parse_partial_rope(
            hf_config, fields["max_position_embeddings"], default_factor=0.5
        )
        has_bias = read_flag(hf_config, "attention_bias")
        attention = AttentionConfig(
            **heads,
            rope=rope,
            rotary_dim=heads["head_dim"] // 2,
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        with_attention = read_layer_numbers(hf_config, "attn_layer_indices") or ()
        return BambaConfig(
            **fields,
            attention=tuple(
                attention if layer_idx in with_attention else None
                for layer_idx in range(fields["num_layers"])
            ),
            mamba=read_bamba_mixer(hf_config, fields),
        )

    def __init__(self, config: BambaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)

        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return Mamba2(config.mamba, dtype=dtype)
            return Attention(attention, dtype=dtype)

        super().__init__(
            config,
            layers=make_dense_layers(config, attention=make_mixer, norm=norm, dtype=dtype),
            norm=norm(config.hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for mixers, MLPs and norms."""
        rules = with_stored_names(super().weight_rules(), _STORED_NAMES)
        return with_renamed_mixers(rules, self.config.attention, MAMBA)


def read_bamba_mixer(hf_config: Mapping[str, object], fields: Mapping[str, object]) -> Mamba2Config:
    """Reads the mixer of families whose fields begin with `mamba_`."""
    num_heads = read_count(hf_config, "mamba_n_heads", 128)
    inner = read_count(hf_config, "mamba_expand", 2) * fields["hidden_size"]
    is_given = hf_config.get("mamba_d_head") not in (None, "auto")
    head_dim = read_count(hf_config, "mamba_d_head") if is_given else inner // num_heads
    config = Mamba2Config(
        hidden_size=fields["hidden_size"],
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=read_count(hf_config, "mamba_d_state", 256),
        num_groups=read_count(hf_config, "mamba_n_groups", 1),
        kernel_size=read_count(hf_config, "mamba_d_conv", 4),
        eps=fields["rms_norm_eps"],
        use_bias=read_flag(hf_config, "mamba_proj_bias"),
        use_conv_bias=read_flag(hf_config, "mamba_conv_bias", True),
        time_step_limit=read_time_step_limit(hf_config),
    )
    check_width(config, hf_config, "mamba_expand")
    return config
