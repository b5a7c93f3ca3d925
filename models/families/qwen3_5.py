"""Qwen3.5, dense: Gated DeltaNet in place of attention in three layers of four. The layer for
multi-token prediction makes drafts with the method `mtp`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from models.config.dense_config import DenseConfig, read_dense_fields
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.dense_decoder import DenseDecoder
from models.families.qwen3_next import make_mixer, mixer_rules, read_mixers
from models.layers.gated_delta_net import LINEAR_ATTENTION, GatedDeltaNetConfig
from models.layers.rms_norm import OffsetRMSNorm
from models.weight_rule import Source, WeightRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3_5Config(DenseConfig):
    """The config of Qwen3.5. Layers without attention have a `GatedDeltaNet`."""

    linear: GatedDeltaNetConfig

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, LINEAR_ATTENTION, self.linear.format())


class Qwen3_5ForCausalLM(DenseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/qwen3_5."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Qwen3_5Config:
        fields = read_dense_fields(hf_config)
        return Qwen3_5Config(**fields, **read_mixers(hf_config, fields, default_num_kv_heads=4))

    def __init__(self, config: Qwen3_5Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_mixer, config.linear, norm=norm, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have one matrix for queries and gates, and four for the `GatedDeltaNet`."""
        return mixer_rules(super().weight_rules(), self.config, join_separate_projections)

    def ignores_weight(self, name: str) -> bool:
        """The layer for multi-token prediction, which `load_mtp_head` loads."""
        return name.startswith("mtp.")


def join_separate_projections(
    rules: dict[str, WeightRule], prefix: str, config: GatedDeltaNetConfig
) -> None:
    """Lets `in_proj_qkvz` and `in_proj_ba` read two stored matrices each.

    Args:
        rules: Of one `GatedDeltaNet`; changed in place. Their names begin with `prefix`.
    """
    parts = {
        "in_proj_qkvz": {"in_proj_qkv": config.num_channels, "in_proj_z": config.v_width},
        "in_proj_ba": {"in_proj_b": config.num_v_heads, "in_proj_a": config.num_v_heads},
    }
    for name, widths in parts.items():
        rule = rules[f"{prefix}{name}.kernel"]
        (joined,) = rule.sources
        sources = tuple(
            Source(name=joined.name.replace(name, part), shape=(width, config.hidden_size))
            for part, width in widths.items()
        )
        rules[f"{prefix}{name}.kernel"] = replace(rule, sources=sources, combine=np.concatenate)
