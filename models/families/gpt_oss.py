"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a window on every second
layer. The published experts are MXFP4.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_flag, read_number
from models.config.layer_types import read_layer_types, read_sliding_window, with_window
from models.config.moe_config import MoEConfig, read_expert_fields
from models.config.rope_config import RopeConfig, parse_rope_config
from models.decoders.moe_decoder import MoEDecoder
from models.layers.experts import Experts, packed_gate_up_rules
from models.layers.rms_norm import RoundedLastRMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import Source, WeightRule, with_renamed_sources

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(MoEConfig):
    """The config of gpt-oss. Every layer has experts, with the activation of `ClampedExperts`."""

    swiglu_alpha: float
    swiglu_limit: float


class GptOssForCausalLM(MoEDecoder):
    """Source: arXiv:2508.10925."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GptOssConfig:
        eps = read_number(hf_config, "rms_norm_eps", 1e-5)
        fields = read_dense_fields({**hf_config, "rms_norm_eps": eps})
        return GptOssConfig(
            **fields,
            **read_expert_fields(
                hf_config,
                num_experts_fields=("num_local_experts", "num_experts"),
                default_num_experts=128,
                default_top_k=4,
                size_field="intermediate_size",
                default_size=fields["intermediate_size"],
            ),
            attention=_read_attention(hf_config, fields),
            has_experts=(True,) * fields["num_layers"],
            swiglu_alpha=read_number(hf_config, "swiglu_alpha", 1.702),
            swiglu_limit=read_number(hf_config, "swiglu_limit", 7.0),
        )

    def __init__(self, config: GptOssConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(
            config,
            sparse_mlp=functools.partial(_make_experts, config, dtype),
            norm=functools.partial(RoundedLastRMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints pack the experts of a layer, and their biases.

        Checkpoints also have another name for the router.
        """
        rules = packed_gate_up_rules(super().weight_rules(), is_interleaved=True, is_turned=True)
        rules = with_renamed_sources(rules, lambda name: name.replace(".mlp.gate.", ".mlp.router."))
        for layer_idx in range(self.config.num_layers):
            rules |= self._bias_rules(f"layers.{layer_idx}.mlp.experts")
        return rules

    def _bias_rules(self, experts: str) -> dict[str, WeightRule]:
        num_experts, inner = self.config.num_experts, self.config.moe_intermediate_size
        packed = Source(name=f"model.{experts}.gate_up_proj_bias", shape=(num_experts, 2 * inner))
        down = Source(
            name=f"model.{experts}.down_proj_bias", shape=(num_experts, self.config.hidden_size)
        )

        def every_second(biases_np: Sequence[np.ndarray], start: int) -> np.ndarray:
            return biases_np[0][:, start::2]

        rules = {
            f"{experts}.{local}.bias": WeightRule(
                sources=(packed,),
                layout="table",
                axes=("experts", "inner"),
                combine=functools.partial(every_second, start=start),
            )
            for start, local in enumerate(("gate_proj", "up_proj"))
        }
        rules[f"{experts}.down_proj.bias"] = WeightRule(
            sources=(down,), layout="table", axes=("experts", None)
        )
        return rules


class ClampedExperts(Experts):
    """Experts with biases whose SwiGLU is bounded: `(up + 1) * gate * sigmoid(alpha * gate)`.

    The gate is at most `limit`, and `up` is from `-limit` to `limit`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        alpha: float,
        limit: float,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(
            num_experts,
            hidden_size,
            intermediate_size,
            activation="silu",
            use_bias=True,
            dtype=dtype,
        )
        self.alpha = alpha
        self.limit = limit

    def join(self, gate: jax.Array, up: jax.Array) -> jax.Array:  # f[places, intermediate]
        """See `Experts.join`. Computed in float32 and rounded once."""
        gate_f32 = jnp.minimum(gate.astype(jnp.float32), self.limit)
        up_f32 = jnp.clip(up.astype(jnp.float32), -self.limit, self.limit)
        joined = (up_f32 + 1) * gate_f32 * jax.nn.sigmoid(self.alpha * gate_f32)
        return joined.astype(gate.dtype)


def _make_experts(config: GptOssConfig, dtype: jnp.dtype) -> SparseMLP:
    return SparseMLP(
        gate=Router(config.hidden_size, config.num_experts, use_bias=True, dtype=dtype),
        # The softmax over the chosen experts alone.
        choose=SoftmaxTopK(top_k=config.num_experts_per_tok, normalizes=True),
        experts=ClampedExperts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
            dtype=dtype,
        ),
    )


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each layer: by default, the first, third and so on have a window."""
    num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
    has_bias = read_flag(hf_config, "attention_bias", True)
    full = AttentionConfig(
        **read_head_fields(
            hf_config,
            default_num_kv_heads=8,
            # A null means the hidden size divided by the number of heads. A missing field means 64.
            default_head_dim=None if "head_dim" in hf_config else 64,
        ),
        rope=_read_rope(hf_config, max_positions),
        qkv_bias=has_bias,
        out_bias=has_bias,
        has_sinks=True,
    )
    window = read_sliding_window(hf_config, default=128)
    is_sliding = [layer_idx % 2 == 0 for layer_idx in range(num_layers)]
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    by_type = {
        "full_attention": full,
        "sliding_attention": with_window(full, window, max_positions),
    }
    return tuple(by_type[layer_type] for layer_type in layer_types)


def _read_rope(hf_config: Mapping[str, object], max_positions: int) -> RopeConfig:
    theta = read_number(hf_config, "rope_theta", 150_000.0)
    hf_config = {**hf_config, "rope_theta": theta}
    if not hf_config.get("rope_scaling") and hf_config.get("rope_parameters") is None:
        hf_config["rope_parameters"] = _DEFAULT_ROPE
    return parse_rope_config(hf_config, max_positions)
