"""Zamba: Mamba in all layers, and one block of attention and an MLP that some of them share."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import (
    first_given,
    read_count,
    read_flag,
    refuse_other_values,
    with_defaults,
)
from models.config.rope_config import RopeConfig
from models.config.state_layers import read_has_state
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states_in
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError
from models.forward.layer_context import LayerContext
from models.layers.head_linear import HeadLinear
from models.layers.linear import Linear
from models.layers.mamba import Mamba, MambaConfig, read_time_step_rank
from models.layers.mamba2 import MAMBA
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm
from models.layers.shared_transformer import (
    EmbeddedCarry,
    RecurrentLayer,
    SharedTransformer,
    SharedTransformerLayer,
    WideAttention,
)
from models.weight_rule import Source, WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_STORED_NAMES = {".shared.": ".shared_transf.", "model.norm.": "model.final_layernorm."}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZambaConfig(DenseConfig):
    """The config of Zamba. Layers with attention run the shared block before their `Mamba`."""

    mamba: MambaConfig

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states_in(spec, [True] * self.num_layers, MAMBA, self.mamba.format())


class ZambaForCausalLM(Decoder):
    """Source: arXiv:2405.16712."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> ZambaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, {"hidden_mamba_act": "silu"})
        fields = read_dense_fields(
            hf_config, default_activation="gelu", default_tie_word_embeddings=True
        )
        hidden_size, num_layers = fields["hidden_size"], fields["num_layers"]
        period = read_count(hf_config, "attn_layer_period", 6)
        offset = read_count(hf_config, "attn_layer_offset", 4, minimum=0)
        by_rule = [False, False, True]
        by_rule += [layer_idx % period == offset for layer_idx in range(num_layers - 3)]
        inner = read_count(hf_config, "mamba_expand", 2) * hidden_size
        num_groups = read_count(hf_config, "n_mamba_heads", 2)
        if inner % num_groups:
            raise ModelConfigError(
                f"config.json: n_mamba_heads is {num_groups}; expected a divisor of the inner "
                f"width of Mamba, {inner}."
            )
        return ZambaConfig(
            **fields,
            attention=read_shared_attention(
                hf_config, by_rule[:num_layers], default_num_kv_heads=16
            ),
            mamba=MambaConfig(
                hidden_size=hidden_size,
                inner=inner,
                state_size=read_count(hf_config, "mamba_d_state", 16),
                time_step_rank=read_time_step_rank(hf_config, "mamba_dt_rank"),
                kernel_size=read_count(hf_config, "mamba_d_conv", 4),
                num_groups=num_groups,
                use_bias=read_flag(hf_config, "mamba_proj_bias"),
                use_conv_bias=read_flag(hf_config, "mamba_conv_bias", True),
            ),
        )

    def __init__(self, config: ZambaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        hidden_size = config.hidden_size
        (attention,) = set(config.attention_layers) or {None}
        shared = attention and SharedTransformer(
            attention=WideAttention(attention, out_features=hidden_size, dtype=dtype),
            mlp=GatedMLP(
                hidden_size, config.intermediate_size, activation=config.hidden_act, dtype=dtype
            ),
            norm=norm,
            width=hidden_size,
        )

        def make_layer(has_attention: bool) -> RecurrentLayer | SharedTransformerLayer:
            mixer = GroupedMamba(config.mamba, dtype=dtype)
            recurrent = RecurrentLayer(mixer=mixer, norm=norm(hidden_size))
            if not has_attention:
                return recurrent
            linear = Linear(hidden_size, hidden_size, dtype=dtype)
            return SharedTransformerLayer(shared=shared, linear=linear, recurrent=recurrent)

        super().__init__(
            config,
            layers=[make_layer(of_layer is not None) for of_layer in config.attention],
            norm=norm(hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """In checkpoints, the inputs and gates of `Mamba` alternate."""
        rules = with_stored_names(super().weight_rules(), _STORED_NAMES)
        return {
            name: replace(rule, combine=_gates_last) if ".mamba.in_proj." in name else rule
            for name, rule in rules.items()
        }

    def ignores_weight(self, name: str) -> bool:
        """A checkpoint may have the shared block in each layer that uses it."""
        return ".shared_transf." in name

    def embed(self, context: LayerContext) -> EmbeddedCarry:
        hidden = super().embed(context).hidden
        return EmbeddedCarry(hidden=hidden, embedded=hidden)


def read_shared_attention(
    hf_config: Mapping[str, object], by_rule: Sequence[bool], *, default_num_kv_heads: int | None
) -> tuple[AttentionConfig | None, ...]:
    """The attention of each layer; None for layers that have only a recurrent mixer.

    Args:
        by_rule: For each layer, whether it has attention if config.json has no list of layers.

    Raises:
        ModelConfigError: A field is of the wrong type, or the input of attention is not twice as
            wide as the hidden size.
    """
    width = 2 * read_count(hf_config, "hidden_size")
    written = read_count(hf_config, "attention_hidden_size", width)
    if written != width:
        raise ModelConfigError(
            f"config.json: attention_hidden_size is {written}; expected {width}, twice the hidden "
            "size, because attention reads the residual stream and the embeddings."
        )
    # Checkpoints use both names for the width of a head.
    name = first_given(hf_config, ("attention_head_dim", "head_dim"))
    heads = read_head_fields(
        hf_config | {"hidden_size": width, "head_dim": hf_config.get(name)},
        default_num_kv_heads=default_num_kv_heads,
    )
    # The scale is that of half the width, because the input is two times as wide as the hidden
    # size.
    heads["scale"] = (heads["head_dim"] / 2) ** -0.5
    attention = AttentionConfig(**heads, rope=RopeConfig(), has_positions=False)
    has_attention = read_has_state(
        hf_config,
        by_rule,
        "hybrid",
        field=first_given(hf_config, ("layers_block_type", "layer_types")),
        others=("mamba", "linear_attention"),
    )
    return tuple(attention if has else None for has in has_attention)


class GroupedMamba(Mamba):
    """`Mamba` in which each group of channels has projections of its own."""

    def _make_projections(self, dtype: jnp.dtype) -> None:
        config = self.config
        groups, width = config.num_groups, config.inner // config.num_groups
        rank = config.time_step_rank
        self.x_proj = HeadLinear(groups, width, rank + 2 * config.state_size, dtype=dtype)
        self.dt_proj = HeadLinear(groups, rank, width, dtype=dtype)
        self.dt_bias = nnx.Param(jnp.zeros((config.inner,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        config = self.config
        dims = (config.num_groups, config.inner // config.num_groups)
        rank, state_size = config.time_step_rank, config.state_size
        kernels = {
            "x_proj": (dims[0], rank + 2 * state_size, dims[1]),
            "dt_proj": (*dims, rank),
        }
        vectors = {
            "A_log": ("A_log", (*dims, state_size), _by_state),
            "D": ("D", dims, _flat),
            "dt_bias": ("dt_proj_bias", dims, _flat),
        }
        return {
            f"{leaf}.kernel": WeightRule(
                sources=(Source(name=f"{name}.{leaf}_weight", shape=shape),),
                layout="heads",
                axes=(None, None, None),
            )
            for leaf, shape in kernels.items()
        } | {
            leaf: WeightRule(
                sources=(Source(name=f"{name}.{stored}", shape=shape),),
                layout="vector",
                axes=(None,),
                combine=combine,
            )
            for leaf, (stored, shape, combine) in vectors.items()
        }

    def _project_state(
        self, x: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        ends = [config.time_step_rank, config.time_step_rank + config.state_size]
        groups = x.reshape(x.shape[0], config.num_groups, -1)
        dt, b, c = jnp.split(self.x_proj(groups, context), ends, axis=2)
        dt = self.dt_proj(dt, context).reshape(x.shape).astype(jnp.float32)
        dt = jax.nn.softplus(dt + self.dt_bias[...].astype(jnp.float32))
        return dt, b.reshape(x.shape[0], -1), c.reshape(x.shape[0], -1)


def _by_state(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    (weight_np,) = weights_np
    return np.ascontiguousarray(weight_np.swapaxes(1, 2)).reshape(-1)


def _flat(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    (weight_np,) = weights_np
    return weight_np.reshape(-1)


def _gates_last(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    (weight_np,) = weights_np
    return np.concatenate([weight_np[0::2], weight_np[1::2]])
