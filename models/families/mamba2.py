"""Mamba2, such as Mamba-Codestral-7B: layers with a state space and nothing else."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.fields import (
    read_count,
    read_flag,
    read_number,
    refuse_other_values,
    with_defaults,
)
from models.config.model_config import ModelConfig, read_model_fields
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.backbone_decoder import BackboneDecoder, read_residual_in_fp32
from models.layers.mamba2 import (
    MAMBA,
    Mamba2,
    Mamba2Config,
    check_width,
    read_time_step_limit,
)

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    # A state takes any number of tokens, and config.json names no limit. The host keeps the tokens
    # of running requests in arrays of this length.
    "max_position_embeddings": 2**17,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2ModelConfig(ModelConfig):
    """The config of a model of `Mamba2` layers."""

    mamba: Mamba2Config
    residual_in_fp32: bool

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, MAMBA, self.mamba.format())


class Mamba2ForCausalLM(BackboneDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/mamba2."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Mamba2ModelConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, {"hidden_act": "silu"})
        fields = read_model_fields(hf_config)
        mamba = Mamba2Config(
            hidden_size=fields["hidden_size"],
            num_heads=read_count(hf_config, "num_heads", 128),
            head_dim=read_count(hf_config, "head_dim", 64),
            state_size=read_count(hf_config, "state_size", 128),
            num_groups=read_count(hf_config, "n_groups", 8),
            kernel_size=read_count(hf_config, "conv_kernel", 4),
            eps=read_number(hf_config, "layer_norm_epsilon", 1e-5),
            use_bias=read_flag(hf_config, "use_bias"),
            use_conv_bias=read_flag(hf_config, "use_conv_bias", True),
            time_step_limit=read_time_step_limit(hf_config),
        )
        check_width(mamba, hf_config, "expand")
        return Mamba2ModelConfig(
            **fields,
            attention=(None,) * fields["num_layers"],
            mamba=mamba,
            residual_in_fp32=read_residual_in_fp32(hf_config),
        )

    def __init__(
        self, config: Mamba2ModelConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            mixer=functools.partial(Mamba2, config.mamba, dtype=dtype),
            eps=config.mamba.eps,
            residual_in_fp32=config.residual_in_fp32,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
