"""Phi-3.5-MoE: layer norms, biases, and two experts that a sparse mixer chooses."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_flag, read_number, refuse_other_values, with_defaults
from models.config.moe_config import MoEConfig, read_expert_fields
from models.decoders.biased_head import BiasedHeadDecoder
from models.decoders.moe_decoder import make_moe_layers
from models.errors import UnsupportedModelError
from models.families.mistral import equally_windowed_layers
from models.layers.experts import make_experts
from models.layers.layer_norm import LayerNorm
from models.layers.routing import Router
from models.layers.routing_rules import SparseMixer
from models.layers.sparse_mlp import SparseMLP, block_sparse_moe_rules
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "lm_head_bias": False,
}
# All releases have a bias of the head.
_SUPPORTED = {"lm_head_bias": True, "tie_word_embeddings": False, "num_experts_per_tok": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhimoeConfig(MoEConfig):
    """The config of Phi-3.5-MoE. `rms_norm_eps` is that of the layer norms."""

    choose: SparseMixer


class PhimoeForCausalLM(BiasedHeadDecoder):
    """Source: arXiv:2404.14219."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> PhimoeConfig:
        hf_config = _with_mscale(with_defaults(hf_config, _DEFAULTS))
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config,
            fields,
            has_bias=read_flag(hf_config, "attention_bias"),
            default_num_kv_heads=8,
        )
        return PhimoeConfig(
            **fields,
            **read_expert_fields(
                hf_config,
                num_experts_fields=("num_local_experts",),
                default_num_experts=16,
                default_top_k=2,
                size_field="intermediate_size",
            ),
            attention=equally_windowed_layers(hf_config, attention, fields, default_window=None),
            has_experts=(True,) * fields["num_layers"],
            choose=SparseMixer(tolerance=read_number(hf_config, "router_jitter_noise", 0.01)),
        )

    def __init__(self, config: PhimoeConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(LayerNorm, eps=config.rms_norm_eps, dtype=dtype)

        def make_sparse_mlp() -> SparseMLP:
            return SparseMLP(
                gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
                choose=config.choose,
                experts=make_experts(config, dtype=dtype),
            )

        layers = make_moe_layers(config, sparse_mlp=make_sparse_mlp, norm=norm, dtype=dtype)
        super().__init__(config, layers=layers, norm=norm(config.hidden_size), dtype=dtype)

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have Mixtral's names for the experts."""
        return block_sparse_moe_rules(super().weight_rules())


def _with_mscale(hf_config: dict[str, object]) -> dict[str, object]:
    """The config.json with longrope's factor of angles under the name that other families use."""
    changed = dict(hf_config)
    for name in ("rope_scaling", "rope_parameters"):
        fields = hf_config.get(name)
        if not isinstance(fields, Mapping) or fields.get("short_mscale") is None:
            continue
        short, long = fields["short_mscale"], fields.get("long_mscale")
        if short != long:
            raise UnsupportedModelError(
                f"config.json: {name} has short_mscale={short!r} and long_mscale={long!r}; "
                "different values are not supported. The releases have equal ones."
            )
        rest = {key: value for key, value in fields.items() if not key.endswith("_mscale")}
        changed[name] = {**rest, "attention_factor": short}
    return changed
