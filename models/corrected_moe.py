"""Parts of families with DeepSeek-V3's experts: a router with corrections, and shared experts."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.errors import ModelConfigError
from models.layers.experts import make_experts
from models.layers.mlp import GatedMLP
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.sparse_mlp import SharedExpertsMLP
from models.moe_config import MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedMoEConfig(MoEConfig):
    """The config of a decoder with a `CorrectedRouter` and shared experts."""

    choose: SigmoidTopK
    shared_intermediate_size: int  # inner width of all shared experts together


def make_corrected_experts(config: CorrectedMoEConfig, *, dtype: jnp.dtype) -> SharedExpertsMLP:
    """Makes the experts of one layer."""
    return SharedExpertsMLP(
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=config.choose,
        experts=make_experts(config, dtype=dtype),
        shared_experts=GatedMLP(
            config.hidden_size,
            config.shared_intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        ),
    )


def read_mlp_layer_types(
    hf_config: Mapping[str, object], default: tuple[bool, ...]
) -> tuple[bool, ...]:
    """For each layer, whether it has experts: `mlp_layer_types`, "dense" or "sparse".

    Args:
        default: The result if config.json has no `mlp_layer_types`.

    Raises:
        ModelConfigError: `mlp_layer_types` is not a list with a known name for each layer.
    """
    written = hf_config.get("mlp_layer_types")
    if written is None:
        return default
    if (
        not isinstance(written, list)
        or len(written) != len(default)
        or any(name not in ("dense", "sparse") for name in written)
    ):
        raise ModelConfigError(
            f"config.json: mlp_layer_types is {written!r}; expected a list of {len(default)} "
            "names, 'dense' or 'sparse', one for each layer."
        )
    return tuple(name == "sparse" for name in written)
