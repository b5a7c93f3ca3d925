"""Qwen3-Next: experts, and Gated DeltaNet in place of attention in three layers of four. The layer
for multi-token prediction makes drafts with the method `mtp`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, refuse_other_values
from models.config.moe_config import read_expert_fields, read_sparse_steps
from models.config.partial_rotary import parse_partial_rope
from models.config.state_layers import read_has_state, read_state_dtype
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import GatedSharedMoEConfig, make_gated_shared_expert
from models.layers.dense_layers import make_head_normed_attention
from models.layers.gated_attention import GatedAttention
from models.layers.gated_delta_net import LINEAR_ATTENTION, GatedDeltaNet, GatedDeltaNetConfig
from models.layers.rms_norm import OffsetRMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import Source, WeightRule, with_renamed_sources


class HybridConfig(Protocol):
    """The fields that mixers need, of a family's config."""

    attention: tuple[AttentionConfig | None, ...]
    linear: GatedDeltaNetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(GatedSharedMoEConfig):
    """The config of Qwen3-Next. Layers without attention have a `GatedDeltaNet`."""

    linear: GatedDeltaNetConfig

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, LINEAR_ATTENTION, self.linear.format())


class Qwen3NextForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/qwen3_next."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Qwen3NextConfig:
        fields = read_dense_fields(hf_config)
        return Qwen3NextConfig(
            **fields,
            **read_expert_fields(
                hf_config, default_num_experts=512, default_top_k=10, default_size=512
            ),
            **read_mixers(hf_config, fields, default_num_kv_heads=2),
            has_experts=read_sparse_steps(hf_config, fields["num_layers"]),
            shared_expert_intermediate_size=read_count(
                hf_config, "shared_expert_intermediate_size", 512
            ),
            normalizes_weights=read_flag(hf_config, "norm_topk_prob", True),
        )

    def __init__(self, config: Qwen3NextConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            attention=functools.partial(make_mixer, config.linear, norm=norm, dtype=dtype),
            sparse_mlp=functools.partial(make_gated_shared_expert, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have one matrix for queries and gates, and other orders of projections."""
        return mixer_rules(super().weight_rules(), self.config, _join_by_head)

    def ignores_weight(self, name: str) -> bool:
        """The layer for multi-token prediction, which `load_mtp_head` loads."""
        return name.startswith("mtp.")


def read_mixers(
    hf_config: Mapping[str, object],
    fields: Mapping[str, object],
    *,
    default_num_kv_heads: int,
) -> dict[str, object]:
    """Reads `attention` and `linear` of families whose layers have one of the two.

    Args:
        fields: The result of `read_dense_fields`, or at least the fields of `ModelConfig` and
            `rms_norm_eps`.
    """
    # With biases, the gate would need a part of the biases of queries.
    refuse_other_values(hf_config, {"attention_bias": False})
    heads = read_head_fields(
        hf_config, default_num_kv_heads=default_num_kv_heads, default_head_dim=256
    )
    rope, factor = parse_partial_rope(
        hf_config, fields["max_position_embeddings"], default_factor=0.25
    )
    attention = AttentionConfig(**heads, rope=rope, rotary_dim=int(heads["head_dim"] * factor))
    interval = read_count(hf_config, "full_attention_interval", 4)
    by_rule = [(layer_idx + 1) % interval != 0 for layer_idx in range(fields["num_layers"])]
    return {
        "attention": tuple(
            None if has_state else attention
            for has_state in read_has_state(hf_config, by_rule, "linear_attention")
        ),
        "linear": GatedDeltaNetConfig(
            hidden_size=fields["hidden_size"],
            num_k_heads=read_count(hf_config, "linear_num_key_heads", 16),
            num_v_heads=read_count(hf_config, "linear_num_value_heads", 32),
            k_dim=read_count(hf_config, "linear_key_head_dim", 128),
            v_dim=read_count(hf_config, "linear_value_head_dim", 128),
            kernel_size=read_count(hf_config, "linear_conv_kernel_dim", 4),
            eps=fields["rms_norm_eps"],
            state_dtype=read_state_dtype(hf_config, "mamba_ssm_dtype"),
        ),
    }


def make_mixer(
    linear: GatedDeltaNetConfig,
    attention: AttentionConfig | None,
    *,
    norm: Callable[[int], nnx.Module],
    dtype: jnp.dtype,
) -> SelfAttention:
    """Makes gated attention, or for None a `GatedDeltaNet`."""
    if attention is None:
        return GatedDeltaNet(linear, dtype=dtype)
    make_attention = functools.partial(GatedAttention, gate=jax.nn.sigmoid)
    return make_head_normed_attention(attention, norm=norm, attention=make_attention, dtype=dtype)


def mixer_rules(
    rules: dict[str, WeightRule],
    config: HybridConfig,
    join_projections: Callable[[dict[str, WeightRule], str, GatedDeltaNetConfig], None],
) -> dict[str, WeightRule]:
    """The rules with the names and forms that checkpoints have for the mixers of `make_mixer`.

    Args:
        join_projections: Called with the rules of one `GatedDeltaNet`, the start of their names,
            and its config. It replaces the rules of `in_proj_qkvz` and `in_proj_ba`.
    """
    for layer_idx, attention in enumerate(config.attention):
        prefix = f"layers.{layer_idx}.self_attn."
        if attention is not None:
            rules |= rules_of_gated_attention(rules, prefix, attention.head_dim)
            continue
        own = with_renamed_sources(
            {name: rule for name, rule in rules.items() if name.startswith(prefix)},
            lambda name: name.replace(".self_attn.", f".{LINEAR_ATTENTION}."),
        )
        join_projections(own, prefix, config.linear)
        rules |= own
    return rules


def rules_of_gated_attention(
    rules: Mapping[str, WeightRule], prefix: str, head_dim: int
) -> dict[str, WeightRule]:
    """Returns the rules of queries and gates: each head's queries and then its gates are rows of
    one matrix, `q_proj`.

    Args:
        prefix: The start of their names, such as "layers.3.self_attn.".
    """
    found = {}
    for part, name in enumerate(("q_proj", "gate_proj")):
        rule = rules[f"{prefix}{name}.kernel"]
        (source,) = rule.sources
        num_rows, num_columns = source.shape
        packed = Source(name=source.name.replace(name, "q_proj"), shape=(2 * num_rows, num_columns))
        take = functools.partial(_take_part, part=part, head_dim=head_dim)
        found[f"{prefix}{name}.kernel"] = replace(rule, sources=(packed,), combine=take)
    return found


def _take_part(weights_np: Sequence[np.ndarray], *, part: int, head_dim: int) -> np.ndarray:
    (weight_np,) = weights_np
    by_head = weight_np.reshape(-1, 2, head_dim, weight_np.shape[1])
    return by_head[:, part].reshape(-1, weight_np.shape[1])


def _join_by_head(rules: dict[str, WeightRule], prefix: str, config: GatedDeltaNetConfig) -> None:
    """Sorts rows by part. Checkpoints have all parts of a key head together."""
    heads_per_key = config.num_v_heads // config.num_k_heads
    width = heads_per_key * config.v_dim
    orders = {
        "in_proj_qkvz": (config.k_dim, config.k_dim, width, width),
        "in_proj_ba": (heads_per_key, heads_per_key),
    }
    for name, sizes in orders.items():
        rule = rules[f"{prefix}{name}.kernel"]
        combine = functools.partial(_parts_together, sizes=sizes)
        rules[f"{prefix}{name}.kernel"] = replace(rule, combine=combine)


def _parts_together(weights_np: Sequence[np.ndarray], *, sizes: Sequence[int]) -> np.ndarray:
    """Sorts rows by part, and then by key head; the checkpoint has them by key head first."""
    (weight_np,) = weights_np
    by_head = weight_np.reshape(-1, sum(sizes), weight_np.shape[1])
    parts = np.split(by_head, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.reshape(-1, weight_np.shape[1]) for part in parts])
