"""Falcon-H1: attention and Mamba2 side by side in each layer, and factors of most parts."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.cache import rules
from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.config.dense_config import Activation, DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_count, read_flag, read_number, with_defaults
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states_in
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError
from models.forward.carry import Carry
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.linear import Linear
from models.layers.mamba2 import MAMBA, Mamba2, Mamba2Config, read_time_step_limit
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Constant factors: of inputs and outputs, of keys, and of parts of projections.

    Args:
        projected: Of the parts of the input projection of Mamba2: gates, inputs, `b`, `c`, and time
            steps.
        mlp: Of the gate before its activation, and of the output.
    """

    attention_in: float
    attention_out: float
    keys: float
    mamba_in: float
    mamba_out: float
    projected: tuple[float, ...]
    mlp: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(DenseConfig):
    """The config of Falcon-H1.

    Args:
        out_bias: Whether the output projection of Mamba2 has a bias.
        has_mamba_norm: Whether the output of Mamba2 is normed.
        norms_first: Whether it is normed before its gate is applied.
    """

    mamba: Mamba2Config
    out_bias: bool
    has_mamba_norm: bool
    norms_first: bool
    mlp_bias: bool
    factors: Factors
    embedding_scale: float
    logits_scale: float

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states_in(spec, [True] * self.num_layers, MAMBA, self.mamba.format())


class FalconH1ForCausalLM(Decoder):
    """Source: arXiv:2507.22448."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> FalconH1Config:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )

        def factor(name: str) -> float:
            return read_number(hf_config, f"{name}_multiplier", 1.0)

        return FalconH1Config(
            **fields,
            attention=(attention,) * fields["num_layers"],
            mamba=_read_mamba(hf_config, fields),
            out_bias=read_flag(hf_config, "projectors_bias"),
            has_mamba_norm=read_flag(hf_config, "mamba_rms_norm"),
            norms_first=read_flag(hf_config, "mamba_norm_before_gate", True),
            mlp_bias=read_flag(hf_config, "mlp_bias"),
            factors=Factors(
                attention_in=factor("attention_in"),
                attention_out=factor("attention_out"),
                keys=factor("key"),
                mamba_in=factor("ssm_in"),
                mamba_out=factor("ssm_out"),
                projected=_read_factors(hf_config, "ssm_multipliers", 5),
                mlp=_read_factors(hf_config, "mlp_multipliers", 2),
            ),
            embedding_scale=factor("embedding"),
            logits_scale=factor("lm_head"),
        )

    def __init__(self, config: FalconH1Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layers=[
                FalconH1Layer(config, attention, norm=norm, dtype=dtype)
                for attention in config.attention
            ],
            norm=norm(),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
            embedding_scale=config.embedding_scale,
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden, kernels) * self.config.logits_scale

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for MLPs and norms."""
        return with_stored_names(super().weight_rules(), _STORED_NAMES)


class FalconH1Layer(nnx.Module):
    """Attention and Mamba2 read the normed residual stream and add to it; then an MLP does."""

    def __init__(
        self,
        config: FalconH1Config,
        attention: AttentionConfig,
        *,
        norm: functools.partial[nnx.Module],
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in."""
        self.input_layernorm = norm()
        self.self_attn = ScaledKeysAttention(attention, factor=config.factors.keys, dtype=dtype)
        self.mamba = ScaledMamba2(config, dtype=dtype)
        self.post_attention_layernorm = norm()
        self.mlp = ScaledGatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            use_bias=config.mlp_bias,
            factors=config.factors.mlp,
            dtype=dtype,
        )
        self.factors = config.factors

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        attended, pages = self.self_attn(
            carry.hidden,
            pages,
            context,
            norm=lambda hidden: self.input_layernorm(hidden) * self.factors.attention_in,
        )
        # Mamba2 writes its state after attention has read keys and values.
        hidden = rules.after(carry.hidden, attended)
        mixed, pages = self.mamba(hidden, pages, context, norm=self.input_layernorm)
        kept = context.of_kept()
        hidden = kept.by_token(self._add_parts, context.kept(carry.hidden), attended, mixed)
        return replace(carry, hidden=hidden), pages

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, mixed: jax.Array, context: LayerContext
    ) -> jax.Array:  # f[num_queries, hidden]
        of_mamba = self.mamba.project_out(mixed, context) * self.factors.mamba_out
        of_attention = self.self_attn.project_out(attended, context) * self.factors.attention_out
        hidden = hidden + (of_mamba + of_attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden), context)


class ScaledKeysAttention(Attention):
    """Attention whose keys have a constant factor."""

    def __init__(self, config: AttentionConfig, *, factor: float, dtype: jnp.dtype) -> None:
        super().__init__(config, dtype=dtype)
        self.factor = factor

    def _project_keys_and_values(
        self, normed: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        k, v = super()._project_keys_and_values(normed, context)
        return k * self.factor, v


class ScaledGatedMLP(GatedMLP):
    """A gated MLP with constant factors of its gate and of its output."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        use_bias: bool,
        factors: tuple[float, ...],
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(
            hidden_size, intermediate_size, activation=activation, use_bias=use_bias, dtype=dtype
        )
        self.gate_factor, self.down_factor = factors

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return super().__call__(x, context) * self.down_factor

    def _activated(self, gate: jax.Array) -> jax.Array:
        return super()._activated(gate * self.gate_factor)


class ScaledMamba2(Mamba2):
    """Mamba2 with constant factors of its input and its projection, and a norm or none."""

    def __init__(self, config: FalconH1Config, *, dtype: jnp.dtype) -> None:
        super().__init__(config.mamba, dtype=dtype)
        self.factors = config.factors
        self.has_norm, self.norms_first = config.has_mamba_norm, config.norms_first
        self.out_proj = Linear(
            config.mamba.inner,
            config.hidden_size,
            axes=("heads", None),
            use_bias=config.out_bias,
            dtype=dtype,
        )
        if not self.has_norm:
            del self.scale

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        found = super().weight_rules(name)
        if not self.has_norm:
            del found["scale"]
        return found

    def _project(self, normed: jax.Array, context: LayerContext) -> jax.Array:
        heads = self.config.projected
        widths = [part.size for part in heads.ranges]
        factors_np = np.repeat(np.array(self.factors.projected, np.float32), widths)
        factors_np = factors_np[heads.order(context.kernels.num_shards)]
        projected = super()._project(normed * self.factors.mamba_in, context)
        return projected * jnp.asarray(factors_np, projected.dtype)

    def _gate(
        self,
        out: jax.Array,  # f32[num_rows, inner]
        gate: jax.Array,  # f[num_rows, inner]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, inner]
        factor = jax.nn.silu(gate.astype(jnp.float32))
        if not self.has_norm:
            return (out * factor).astype(gate.dtype)
        out = out if self.norms_first else out * factor
        groups = out.reshape(out.shape[0], self.config.num_groups, -1)
        mean = (groups * groups).mean(axis=-1, keepdims=True)
        normed = (groups * jax.lax.rsqrt(mean + self.config.eps)).reshape(out.shape)
        normed = self.scale[...].astype(jnp.float32) * normed
        return (normed * factor if self.norms_first else normed).astype(gate.dtype)


def _read_mamba(hf_config: Mapping[str, object], fields: Mapping[str, object]) -> Mamba2Config:
    hidden_size = fields["hidden_size"]
    # null stands for mamba_expand * hidden_size, and a missing field for 1024.
    is_null = hf_config.get("mamba_d_ssm", 1024) is None
    expanded = read_count(hf_config, "mamba_expand", 2) * hidden_size
    inner = expanded if is_null else read_count(hf_config, "mamba_d_ssm", 1024)
    num_heads = read_count(hf_config, "mamba_n_heads", 128)
    is_given = hf_config.get("mamba_d_head") not in (None, "auto")
    config = Mamba2Config(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=read_count(hf_config, "mamba_d_head") if is_given else inner // num_heads,
        state_size=read_count(hf_config, "mamba_d_state", 256),
        num_groups=read_count(hf_config, "mamba_n_groups", 1),
        kernel_size=read_count(hf_config, "mamba_d_conv", 4),
        eps=fields["rms_norm_eps"],
        use_bias=read_flag(hf_config, "mamba_proj_bias"),
        use_conv_bias=read_flag(hf_config, "mamba_conv_bias", True),
        time_step_limit=read_time_step_limit(hf_config),
    )
    if config.inner != inner:
        raise ModelConfigError(
            f"config.json: mamba_n_heads is {num_heads} and mamba_d_head is {config.head_dim}; "
            f"expected a product of {inner}, the inner width of Mamba2 (mamba_d_ssm)."
        )
    return config


def _read_factors(hf_config: Mapping[str, object], name: str, count: int) -> tuple[float, ...]:
    written = hf_config.get(name)
    numbers = [1.0] * count if written is None else written
    if (
        not isinstance(numbers, Sequence)
        or len(numbers) != count
        or not all(isinstance(number, int | float) for number in numbers)
    ):
        raise ModelConfigError(
            f"config.json: {name} is {written!r}; expected a list of {count} numbers."
        )
    return tuple(map(float, numbers))
