"""Mamba in its first form: layers with a state space and nothing else."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

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
from models.layers.mamba import Mamba, MambaConfig, read_time_step_rank
from models.layers.mamba2 import MAMBA

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    # The model has no limit of tokens. The host keeps the tokens of running requests in arrays of
    # this length.
    "max_position_embeddings": 2**17,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaModelConfig(ModelConfig):
    """The config of a model of `Mamba` layers."""

    mamba: MambaConfig
    eps: float  # of the norms of layers
    residual_in_fp32: bool

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, MAMBA, self.mamba.format())


class MambaForCausalLM(BackboneDecoder):
    """Source: arXiv:2312.00752."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MambaModelConfig:
        return MambaModelConfig(**read_mamba_fields(hf_config))

    def __init__(
        self, config: MambaModelConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            mixer=functools.partial(
                Mamba, config.mamba, norm=self.make_mixer_norm(config), dtype=dtype
            ),
            eps=config.eps,
            residual_in_fp32=config.residual_in_fp32,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    @staticmethod
    def make_mixer_norm(config: MambaModelConfig) -> Callable[[int], nnx.Module] | None:
        """Returns the argument `norm` of `Mamba`."""
        return None


def read_mamba_fields(hf_config: Mapping[str, object]) -> dict[str, object]:
    """Reads the fields of `MambaModelConfig`; raises what `read_model_fields` raises."""
    hf_config = with_defaults(hf_config, _DEFAULTS)
    refuse_other_values(hf_config, {"hidden_act": "silu"})
    fields = read_model_fields(hf_config, default_tie_word_embeddings=True)
    expanded = read_count(hf_config, "expand", 2) * fields["hidden_size"]
    mamba = MambaConfig(
        hidden_size=fields["hidden_size"],
        # `expand` is wrong in Falcon-Mamba-7B, where it is 16, so `intermediate_size` comes first.
        inner=read_count(hf_config, "intermediate_size", expanded),
        state_size=read_count(hf_config, "state_size", 16),
        time_step_rank=read_time_step_rank(hf_config, "time_step_rank"),
        kernel_size=read_count(hf_config, "conv_kernel", 4),
        use_bias=read_flag(hf_config, "use_bias"),
        use_conv_bias=read_flag(hf_config, "use_conv_bias", True),
    )
    return fields | {
        "attention": (None,) * fields["num_layers"],
        "mamba": mamba,
        "eps": read_number(hf_config, "layer_norm_epsilon", 1e-5),
        "residual_in_fp32": read_residual_in_fp32(hf_config),
    }
