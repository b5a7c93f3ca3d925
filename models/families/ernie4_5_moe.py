"""ERNIE 4.5 with experts: ERNIE's attention, and experts chosen by corrected softmaxes."""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import (
    read_count,
    read_number,
    refuse_other_values,
    with_defaults,
)
from models.config.moe_config import read_expert_fields
from models.decoders.corrected_moe import CorrectedMoEConfig, make_corrected_experts
from models.decoders.moe_decoder import MoEDecoder
from models.layers.attention import Attention
from models.layers.rms_norm import RMSNorm
from models.layers.rotary import apply_rotary_to_neighbors
from models.layers.routing_rules import CorrectedSoftmaxTopK
from models.weight_rule import Source, WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 5e5}
# No release has biases.
_SUPPORTED = {"use_bias": False}


class Ernie4_5_MoeForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/ernie4_5_moe."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CorrectedMoEConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(hf_config, default_tie_word_embeddings=True)
        attention = read_attention(hf_config, fields, has_bias=False, default_num_kv_heads=4)
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("moe_num_experts", "num_experts"),
            top_k_fields=("moe_k", "num_experts_per_tok"),
            default_top_k=6,
            default_num_experts=64,
            default_size=1536,
        )
        num_shared = read_count(hf_config, "moe_num_shared_experts", 2, minimum=0)
        return CorrectedMoEConfig(
            **fields,
            **experts,
            attention=(attention,) * fields["num_layers"],
            has_experts=_read_has_experts(hf_config, fields["num_layers"]),
            choose=CorrectedSoftmaxTopK(
                top_k=experts["num_experts_per_tok"],
                min_sum=read_number(hf_config, "moe_norm_min", 1e-12),
            ),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
        )

    def __init__(
        self, config: CorrectedMoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            attention=functools.partial(Attention, rotate=apply_rotary_to_neighbors, dtype=dtype),
            sparse_mlp=functools.partial(make_corrected_experts, config, dtype=dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints store the corrections as one row of a matrix, under another name."""
        rules = super().weight_rules()
        for name, rule in rules.items():
            if name.endswith(".correction_bias"):
                (source,) = rule.sources
                stored = Source(
                    name=source.name.replace(".gate.", ".moe_statics."), shape=(1, *source.shape)
                )
                rules[name] = dataclasses.replace(rule, sources=(stored,), combine=_first_row)
        return rules

    def ignores_weight(self, name: str) -> bool:
        """The layers for multi-token prediction are not needed."""
        return name.startswith("model.mtp_")


def _first_row(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0][0]


def _read_has_experts(hf_config: Mapping[str, object], num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts: every `moe_layer_interval`-th layer of a range."""
    first = read_count(hf_config, "moe_layer_start_index", 1, minimum=0)
    last = hf_config.get("moe_layer_end_index")
    if last in (None, -1):
        last = num_layers - 1
    last = read_count({"moe_layer_end_index": last}, "moe_layer_end_index", minimum=0)
    interval = read_count(hf_config, "moe_layer_interval", 1)
    return tuple(
        first <= layer_idx <= last and (layer_idx + 1) % interval == 0
        for layer_idx in range(num_layers)
    )
