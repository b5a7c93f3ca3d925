"""Falcon-Mamba: Mamba with norms of time steps and of the vectors B and C."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flax import nnx

from models.config.fields import read_number
from models.families.mamba import MambaForCausalLM, MambaModelConfig, read_mamba_fields
from models.layers.rms_norm import UnscaledRMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconMambaConfig(MambaModelConfig):
    """The config of Falcon-Mamba."""

    mixer_eps: float  # of the norms inside `Mamba`


class FalconMambaForCausalLM(MambaForCausalLM):
    """Source: arXiv:2410.05355."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> FalconMambaConfig:
        return FalconMambaConfig(
            **read_mamba_fields(hf_config), mixer_eps=read_number(hf_config, "mixer_rms_eps", 1e-6)
        )

    @staticmethod
    def make_mixer_norm(config: FalconMambaConfig) -> Callable[[int], nnx.Module] | None:
        def make(num_features: int) -> UnscaledRMSNorm:
            return UnscaledRMSNorm(eps=config.mixer_eps)

        return make
