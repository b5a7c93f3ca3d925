"""Zamba2: Mamba2 in all layers, and blocks of attention and an MLP that some layers share."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config.dense_config import DenseConfig, read_dense_fields
from models.config.fields import read_count, read_flag, refuse_other_values, with_defaults
from models.config.rope_config import parse_rope_config
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states_in
from models.decoders.decoder import Decoder
from models.families.zamba import read_shared_attention
from models.forward.layer_context import LayerContext
from models.layers.linear import Linear
from models.layers.mamba2 import MAMBA, Mamba2, Mamba2Config, check_width
from models.layers.mlp import GatedMLP
from models.layers.packed_weights import with_packed_gate_up
from models.layers.rms_norm import RMSNorm
from models.layers.shared_transformer import (
    EmbeddedCarry,
    RecurrentLayer,
    SharedTransformer,
    SharedTransformerLayer,
    WideAttention,
)
from models.weight_rule import SplitAxis, WeightRule, with_renamed_sources, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Linear of the shared block -> names of the adapters that change it, here and in checkpoints.
_OF_ATTENTION = {
    "self_attn.q_proj": ("q_adapter", "self_attn.linear_q_adapter_list"),
    "self_attn.k_proj": ("k_adapter", "self_attn.linear_k_adapter_list"),
    "self_attn.v_proj": ("v_adapter", "self_attn.linear_v_adapter_list"),
}
_OF_MLP = {
    "feed_forward.gate_proj": ("gate_adapter", "feed_forward.gate_up_proj_adapter_list"),
    "feed_forward.up_proj": ("up_adapter", "feed_forward.gate_up_proj_adapter_list"),
}
_ADAPTERS = _OF_ATTENTION | _OF_MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2Config(DenseConfig):
    """The config of Zamba2. Layers with attention run a shared block before their `Mamba2`.

    Args:
        num_blocks: Shared blocks. The layers with attention use them in turn.
        adapter_rank: Width of the adapters of the shared MLP. Each layer has its own adapters.
        adapts_attention: Whether layers also have adapters of queries, keys and values.
    """

    mamba: Mamba2Config
    num_blocks: int
    adapter_rank: int
    adapts_attention: bool

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states_in(spec, [True] * self.num_layers, MAMBA, self.mamba.format())

    @property
    def layers_with_attention(self) -> list[int]:
        return [idx for idx, of_layer in enumerate(self.attention) if of_layer is not None]


class Zamba2ForCausalLM(Decoder):
    """Unlike in transformers, `time_step_min` is no lower bound of time steps: the kernels of the
    release have no bound.

    Source: arXiv:2411.15242.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Zamba2Config:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        # With `use_long_context`, the release also scales its rotary embeddings.
        refuse_other_values(hf_config, {"add_bias_linear": False, "use_long_context": False})
        hidden_size = read_count(hf_config, "hidden_size")
        width = read_count(hf_config, "intermediate_size", 4 * hidden_size)
        fields = read_dense_fields(
            hf_config | {"intermediate_size": width},
            default_activation="gelu",
            default_tie_word_embeddings=True,
        )
        num_heads = read_count(hf_config, "n_mamba_heads", 8)
        head_dim = read_count(hf_config, "mamba_expand", 2) * hidden_size // num_heads
        mamba = Mamba2Config(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=read_count(hf_config, "mamba_headdim", head_dim),
            state_size=read_count(hf_config, "mamba_d_state", 64),
            num_groups=read_count(hf_config, "mamba_ngroups", 1),
            kernel_size=read_count(hf_config, "mamba_d_conv", 4),
            eps=1e-5,
        )
        check_width(mamba, hf_config, "mamba_expand")
        attention = read_shared_attention(
            hf_config, _default_layers(fields["num_layers"]), default_num_kv_heads=None
        )
        if read_flag(hf_config, "use_mem_rope"):
            rope = parse_rope_config(hf_config, fields["max_position_embeddings"])
            attention = tuple(
                layer and replace(layer, rope=rope, has_positions=True) for layer in attention
            )
        return Zamba2Config(
            **fields,
            attention=attention,
            mamba=mamba,
            num_blocks=read_count(hf_config, "num_mem_blocks", 1),
            adapter_rank=read_count(hf_config, "adapter_rank", 128),
            adapts_attention=read_flag(hf_config, "use_shared_attention_adapter"),
        )

    def __init__(self, config: Zamba2Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        hidden_size = config.hidden_size
        with_attention = config.layers_with_attention
        blocks = [
            SharedTransformer(
                attention=WideAttention(
                    config.attention[layer_idx], out_features=hidden_size, dtype=dtype
                ),
                mlp=GatedMLP(
                    hidden_size, config.intermediate_size, activation=config.hidden_act, dtype=dtype
                ),
                norm=norm,
                width=hidden_size,
            )
            for layer_idx in with_attention[: config.num_blocks]
        ]

        def make_layer(layer_idx: int) -> RecurrentLayer | AdaptedLayer:
            recurrent = RecurrentLayer(
                mixer=Mamba2(config.mamba, dtype=dtype), norm=norm(hidden_size)
            )
            if layer_idx not in with_attention:
                return recurrent
            block_idx = with_attention.index(layer_idx) % config.num_blocks
            return AdaptedLayer(config, blocks[block_idx], recurrent=recurrent, dtype=dtype)

        super().__init__(
            config,
            layers=[make_layer(layer_idx) for layer_idx in range(config.num_layers)],
            norm=norm(hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have the adapters of all layers in the shared block's first layer."""
        config = self.config
        rules = with_packed_gate_up(
            super().weight_rules(),
            num_layers=config.num_layers,
            intermediate_size=config.intermediate_size,
            mlp="shared.feed_forward",
        )
        with_attention = config.layers_with_attention
        for idx, layer_idx in enumerate(with_attention):
            block = f"model.layers.{with_attention[idx % config.num_blocks]}.shared"
            for name, stored in _ADAPTERS.values():
                own = {
                    rule_name: rule
                    for rule_name, rule in rules.items()
                    if rule_name.startswith(f"layers.{layer_idx}.{name}.")
                }
                names = {
                    f"model.layers.{layer_idx}.{name}.{part}.": f"{block}.{stored}.{idx}.{number}."
                    for number, part in enumerate(("down", "up"))
                }
                rules |= with_stored_names(own, names)
        rules = {name: _packed(name, rule) for name, rule in rules.items()}
        return with_renamed_sources(
            rules,
            lambda name: name.replace(".shared.", ".shared_transformer.").replace(
                "model.norm.", "model.final_layernorm."
            ),
        )

    def ignores_weight(self, name: str) -> bool:
        """A checkpoint may have the shared block in each layer that uses it."""
        return ".shared_transformer." in name

    def embed(self, context: LayerContext) -> EmbeddedCarry:
        hidden = super().embed(context).hidden
        return EmbeddedCarry(hidden=hidden, embedded=hidden)


class Adapter(nnx.Module):
    """A product of two narrow matrices, which is added to the output of a `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        axis: SplitAxis,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the adapter with weights to be filled in.

        Args:
            axis: What a mesh splits of the outputs.
        """
        self.down = Linear(in_features, rank, dtype=dtype)
        self.up = Linear(rank, out_features, axes=(None, axis), dtype=dtype)

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, out_features]
        return self.up(self.down(x, context), context)


class AdaptedLayer(SharedTransformerLayer):
    """A layer that changes projections of the shared block by adapters of its own."""

    def __init__(
        self,
        config: Zamba2Config,
        shared: SharedTransformer,
        *,
        recurrent: RecurrentLayer,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in."""
        hidden_size = config.hidden_size
        linear = Linear(hidden_size, hidden_size, dtype=dtype)
        super().__init__(shared=shared, linear=linear, recurrent=recurrent)
        adapter = functools.partial(Adapter, rank=config.adapter_rank, dtype=dtype)
        self.adapts_attention = config.adapts_attention
        if config.adapts_attention:
            attention = shared.self_attn.config
            width = attention.num_kv_heads * attention.head_dim
            self.q_adapter = adapter(
                2 * hidden_size, attention.num_q_heads * attention.head_dim, axis="heads"
            )
            self.k_adapter = adapter(2 * hidden_size, width, axis="kv_heads")
            self.v_adapter = adapter(2 * hidden_size, width, axis="kv_heads")
        self.gate_adapter = adapter(hidden_size, config.intermediate_size, axis="inner")
        self.up_adapter = adapter(hidden_size, config.intermediate_size, axis="inner")

    def adapted(self, context: LayerContext) -> LayerContext:
        adapters = {
            f"shared.{name}": getattr(self, own)
            for name, (own, _) in (_ADAPTERS if self.adapts_attention else _OF_MLP).items()
        }

        def change(name: str, x: jax.Array, y: jax.Array, context: LayerContext) -> jax.Array:
            return y + adapters[name](x, context) if name in adapters else y

        return context.add_linear_change(change)


def _default_layers(num_layers: int) -> list[bool]:
    """For each layer, whether it has attention if config.json has no list of layers."""
    return [layer_idx in (6, 12, 18, 24, 30, 36, 42, 47, 51) for layer_idx in range(num_layers)]


def _packed(name: str, rule: WeightRule) -> WeightRule:
    """The rule of an adapter. In checkpoints, the MLP has one adapter: rows of gate, then of up."""
    if ".gate_adapter.up." not in name and ".up_adapter.up." not in name:
        return rule
    (source,) = rule.sources
    num_rows, rank = source.shape
    part = 0 if ".gate_adapter." in name else 1
    return replace(
        rule,
        sources=(replace(source, shape=(2 * num_rows, rank)),),
        combine=functools.partial(_take_half, part=part),
    )


def _take_half(weights_np: Sequence[np.ndarray], *, part: int) -> np.ndarray:
    (weight_np,) = weights_np
    return np.split(weight_np, 2)[part]
