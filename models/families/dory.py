"""Dory: a normalized transformer (nGPT) that runs its middle layers several times, each time with
a KV cache of its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import Activation, read_activation, read_head_fields
from models.config.fields import (
    read_count,
    read_flag,
    read_number,
    refuse_other_values,
    with_defaults,
)
from models.config.layer_types import attention_by_type, read_layer_types, read_sliding_window
from models.config.model_config import ModelConfig, read_model_fields
from models.config.rope_config import parse_ropes_by_layer_type, with_default_rope
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.loop_entry import LoopedCarry, LoopEntry
from models.layers.unit_sphere import (
    UnitFactors,
    UnitNorm,
    UnitSphereAttention,
    UnitSphereLayer,
    UnitSphereMLP,
)
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "head_dim": 256,
    "initializer_range": 0.0177,
    "max_position_embeddings": 8192,
    "n_input_layers": 8,
    "n_output_layers": 8,
    "num_key_value_heads": 4,
}
_DEFAULT_ROPE = {
    "full_attention": {"rope_theta": 10_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}
_LAYER_COUNTS = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoryConfig(ModelConfig):
    """The config of Dory. `num_layers` counts every pass through a layer, and every `LoopEntry`."""

    intermediate_size: int
    hidden_act: Activation
    mlp_bias: bool
    initial_rate: float  # of attention and the MLP, before training
    # The stored layer that each layer has the weights of. None: a `LoopEntry`.
    stored_layers: tuple[int | None, ...]


class DoryForCausalLM(Decoder):
    """Source: huggingface.co/docs/transformers/model_doc/dory."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DoryConfig:
        refuse_other_values(hf_config, {"recurrent_kv_cache_mode": "per_loop"})
        hf_config = with_defaults(with_default_rope(hf_config, _DEFAULT_ROPE), _DEFAULTS)
        hf_config = _with_pairs_as_layers(hf_config)
        stored_layers = _read_order(hf_config)
        attention = _read_attention(hf_config)
        fields = read_model_fields(hf_config) | {
            "num_layers": len(stored_layers),
            "initializer_range": read_number(hf_config, "initializer_range"),
        }
        return DoryConfig(
            **fields,
            attention=tuple(None if idx is None else attention[idx] for idx in stored_layers),
            intermediate_size=read_count(hf_config, "intermediate_size"),
            hidden_act=read_activation(hf_config, "hidden_act", "silu"),
            mlp_bias=read_flag(hf_config, "mlp_bias"),
            initial_rate=read_number(hf_config, "ngpt_alpha_init", 0.05),
            stored_layers=stored_layers,
        )

    def __init__(self, config: DoryConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        unit = config.initializer_range

        def make_layer(attention: AttentionConfig) -> UnitSphereLayer:
            return UnitSphereLayer(
                attention=UnitSphereAttention(attention, unit=unit, dtype=dtype),
                mlp=UnitSphereMLP(
                    config.hidden_size,
                    config.intermediate_size,
                    activation=config.hidden_act,
                    use_bias=config.mlp_bias,
                    dtype=dtype,
                ),
                rate_unit=config.initial_rate / unit,
                dtype=dtype,
            )

        order = config.stored_layers
        of_stored = dict(zip(order, config.attention, strict=True))
        stored = {idx: make_layer(of_stored[idx]) for idx in of_stored if idx is not None}
        layers = [
            LoopEntry(norm=UnitNorm(), is_first=place == order.index(None))
            if idx is None
            else stored[idx]
            for place, idx in enumerate(order)
        ]
        super().__init__(
            config, layers=layers, norm=UnitNorm(), has_head_kernel=has_head_kernel, dtype=dtype
        )
        self.logit_scale = UnitFactors(config.vocab_size, unit=1 / unit, axis="vocab", dtype=dtype)

    def embed(self, context: LayerContext) -> LoopedCarry:
        hidden = super().embed(context).hidden
        return LoopedCarry(hidden=hidden, loop_input=jnp.zeros_like(hidden))

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return self.logit_scale(super().compute_logits(hidden, kernels))

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Sources have the names of tensors that transformers saves."""

        def rename(name: str) -> str:
            name = name.replace("model.logit_scale", "lm_head.logit_scale")
            name = name.replace("model.embed_tokens.", "backbone.embeddings.")
            name = name.replace(".self_attn.gate_proj.", ".self_attn.g_proj.")
            name = re.sub(r"\.self_attn\.gate$", ".self_attn.s_gate", name)
            return re.sub(r"^model\.layers\.(\d+)", self._stored_layer, name)

        return with_renamed_sources(super().weight_rules(), rename)

    def _stored_layer(self, match: re.Match[str]) -> str:
        return f"backbone.layers.{self.config.stored_layers[int(match[1])]}"

    def name_weight(self, name: str) -> str:
        """On the hub, attention and the MLP of layer i are layers 2i and 2i + 1."""
        return re.sub(r"\blayers\.(\d+)\.(mixer|attn_alpha|mlp_alpha)\b", _name_part, name)


def _name_part(match: re.Match[str]) -> str:
    idx, part = int(match[1]), match[2]
    if part == "mixer":
        part = "mlp" if idx % 2 else "self_attn"
    names = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}
    return f"layers.{idx // 2}.{names.get(part, part)}"


def _with_pairs_as_layers(hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """The config.json with layers of attention and an MLP, if it counts them as two layers."""
    layer_types = hf_config.get("layer_types")
    if not isinstance(layer_types, list) or "mlp" not in layer_types:
        return hf_config
    given = [name for name in _LAYER_COUNTS if hf_config.get(name) is not None]
    counts = {name: read_count(hf_config, name, minimum=0) for name in given}
    is_by_turns = "mlp" not in layer_types[::2] and set(layer_types[1::2]) == {"mlp"}
    if not is_by_turns or any(count % 2 for count in counts.values()):
        raise ModelConfigError(
            f"config.json: layer_types is {layer_types!r}, with {counts}; expected a type of "
            "attention and 'mlp' by turns, and even numbers of layers."
        )
    halves = {name: count // 2 for name, count in counts.items()}
    return {**hf_config, **halves, "layer_types": layer_types[::2]}


def _read_order(hf_config: Mapping[str, object]) -> tuple[int | None, ...]:
    """Reads `DoryConfig.stored_layers`."""
    num_layers = read_count(hf_config, "num_hidden_layers")
    num_first, num_last = (
        read_count(hf_config, name, minimum=0) for name in ("n_input_layers", "n_output_layers")
    )
    others = num_layers - num_first - num_last
    num_looped = read_count(hf_config, "n_recurrent_layers", max(others, 0), minimum=0)
    if num_looped != others:
        raise ModelConfigError(
            f"config.json: n_recurrent_layers={num_looped} with n_input_layers={num_first} and "
            f"n_output_layers={num_last}; expected num_hidden_layers={num_layers} as their sum."
        )
    loop = (None, *range(num_first, num_first + num_looped))
    num_loops = read_count(hf_config, "n_recurrent_loops", 2)
    return (*range(num_first), *loop * num_loops, *range(num_layers - num_last, num_layers))


def _read_attention(hf_config: Mapping[str, object]) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each stored layer."""
    num_layers = read_count(hf_config, "num_hidden_layers")
    max_positions = read_count(hf_config, "max_position_embeddings")
    is_sliding = [(layer_idx + 1) % 4 != 0 for layer_idx in range(num_layers)]
    window = read_sliding_window(hf_config, default=1024)
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    ropes = parse_ropes_by_layer_type(hf_config, max_positions, required_types=set(layer_types))
    heads = read_head_fields(hf_config)
    has_bias = read_flag(hf_config, "attention_bias")
    full, sliding = (
        AttentionConfig(**heads, rope=rope, qkv_bias=has_bias, out_bias=has_bias) for rope in ropes
    )
    return attention_by_type(
        hf_config,
        is_sliding,
        full=full,
        sliding=sliding,
        window=window,
        max_position_embeddings=max_positions,
    )
