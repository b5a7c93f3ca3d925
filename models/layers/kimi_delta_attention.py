"""`KimiDeltaAttention`: the gated delta rule with a decay for each dimension of keys."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.forward.kernel_settings import TOKENS_BY_FEATURE, WHOLE
from models.forward.layer_context import LayerContext, LayerState
from models.head_split import HeadRange, HeadSplit, heads_on_each, num_parts
from models.layers.advance_states import advance_heads
from models.layers.gated_delta_net import with_length_one
from models.layers.linear import Linear
from models.layers.self_attention import Norm
from models.layers.short_convolution import ShortConvolution
from models.weight_rule import Source, WeightRule

# The name of the layer's cache of states.
DELTA_ATTENTION = "delta_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaConfig:
    """The sizes of a `KimiDeltaAttention`. Queries, keys and values have equal heads.

    Args:
        has_inner_vectors: Whether decays and gates are projections of inner vectors, which are as
            wide as a head. Otherwise they are projections of the layer's input.
        min_log_decay: If given, the logarithm of a decay is a sigmoid between this number and 0.
            Otherwise it is a negative softplus, which has no lower bound.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    kernel_size: int  # of the convolution
    eps: float  # of the norm of each head's output
    has_inner_vectors: bool = True
    min_log_decay: float | None = None

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def heads(self) -> HeadRange:
        """The entries of all queries, keys or values."""
        return HeadRange(num_heads=self.num_heads, head_dim=self.head_dim)

    @property
    def numbers(self) -> HeadRange:
        """One number for each head."""
        return HeadRange(num_heads=self.num_heads, head_dim=1)

    @property
    def projected(self) -> dict[str, HeadRange]:
        """Name of each part of the projection in checkpoints -> its heads."""
        ranges = dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.heads)
        if self.has_inner_vectors:
            inner = HeadRange(num_heads=1, head_dim=self.head_dim)
            ranges |= dict.fromkeys(("f_a_proj", "g_a_proj"), inner)
        else:
            ranges |= dict.fromkeys(("f_proj", "g_proj"), self.heads)
        return ranges | {"b_proj": self.numbers}

    @property
    def channels(self) -> HeadSplit:
        return self.split(*[self.heads] * 3)

    def split(self, *ranges: HeadRange) -> HeadSplit:
        return HeadSplit(ranges=ranges, heads_of_layer=(self.num_heads,))

    def on_each_of(self, num_devices: int) -> "KimiDeltaConfig":
        """The heads of one device."""
        parts = num_parts((self.num_heads,), num_devices)
        return replace(self, num_heads=heads_on_each(self.num_heads, parts))

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs, and the state."""
        window = (self.kernel_size - 1, 3 * self.width)
        return StateFormat(
            shapes=(window, (self.num_heads, self.head_dim, self.head_dim)),
            num_windows=1,
            step_op="gated_delta_step",
            heads=((1, self.channels), (0, self.split(self.numbers))),
        )


class _Vectors(NamedTuple):
    """Weights of all heads, or of the heads of one device."""

    conv1d: tuple[jax.Array, jax.Array | None]
    dt_bias: jax.Array  # f32[width]
    A_log: jax.Array  # f32[num_heads]


class KimiDeltaAttention(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    Checkpoints have a separate matrix for each part of `in_proj`: queries, keys, values, decays or
    their inner vectors, gates or their inner vectors, and `b`. They have separate convolutions for
    queries, keys and values.

    Source: Kimi Linear, arXiv:2510.26692.
    """

    def __init__(self, config: KimiDeltaConfig, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.config = config
        width = config.width
        projected = config.split(*config.projected.values())
        self.in_proj = Linear(
            config.hidden_size,
            projected.size,
            axes=(None, "heads"),
            heads=projected,
            dtype=dtype,
        )
        self.conv1d = ShortConvolution(
            3 * width, config.kernel_size, heads=config.channels, dtype=dtype
        )
        if config.has_inner_vectors:
            self.f_b_proj = Linear(config.head_dim, width, axes=(None, "heads"), dtype=dtype)
            self.g_b_proj = Linear(config.head_dim, width, axes=(None, "heads"), dtype=dtype)
        self.dt_bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.A_log = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((config.head_dim,), dtype))
        self.o_proj = Linear(width, config.hidden_size, axes=("heads", None), dtype=dtype)

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        config = self.config
        vectors = {
            "dt_bias": Source(name=f"{name}.dt_bias", shape=(config.width,)),
            "A_log": Source(
                name=f"{name}.A_log",
                shape=(config.num_heads,),
                other_shapes=((1, 1, config.num_heads, 1),),
            ),
            "scale": Source(name=f"{name}.o_norm.weight", shape=(config.head_dim,)),
        }
        heads = {
            "dt_bias": config.split(config.heads),
            "A_log": config.split(config.numbers),
            "scale": None,
        }
        rules = {
            leaf: WeightRule(
                sources=(source,),
                layout="vector",
                axes=(None,),
                combine=_flattened,
                heads=heads[leaf],
            )
            for leaf, source in vectors.items()
        }
        projections = tuple(
            Source(name=f"{name}.{part}.weight", shape=(heads.size, config.hidden_size))
            for part, heads in config.projected.items()
        )
        whole = self.in_proj.weight_rules(f"{name}.in_proj")["kernel"]
        rules["in_proj.kernel"] = replace(whole, sources=projections, combine=np.concatenate)
        convolutions = tuple(
            Source(name=f"{name}.{part}_conv1d.weight", shape=(config.width, 1, config.kernel_size))
            for part in "qkv"
        )
        whole = self.conv1d.weight_rules(f"{name}.conv1d")["kernel"]
        rules["conv1d.kernel"] = replace(whole, sources=convolutions)
        return rules

    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, Pages]:
        """Returns the input of `project_out`, f[num_queries, width], and the pages."""
        num_devices = context.kernels.num_shards
        own = self.config.on_each_of(num_devices)
        is_split = self.config.channels.is_split(num_devices)
        axis = "heads" if is_split else None
        # Each device has the whole inner vectors.
        inner = WHOLE if self.config.has_inner_vectors else TOKENS_BY_FEATURE
        specs = [TOKENS_BY_FEATURE, inner, inner, TOKENS_BY_FEATURE] if is_split else None
        widths = [heads.size for heads in own.projected.values()]

        def project(hidden: jax.Array, context: LayerContext) -> tuple[jax.Array, ...]:
            kernels = context.kernels
            projected = kernels.split_last(self.in_proj(norm(hidden), context), axis)
            parts = kernels.cut_features(projected, (sum(widths[:3]), *widths[3:]), specs)
            qkv, f, g, b = parts
            if self.config.has_inner_vectors:
                f, g = (
                    kernels.split_last(project(y, context), axis)
                    for project, y in ((self.f_b_proj, f), (self.g_b_proj, g))
                )
            return qkv, f, g, b

        qkv, f, gate, b = context.by_token(project, hidden)
        vectors = _Vectors(self.conv1d.vectors, self.dt_bias[...], self.A_log[...])
        out, pages = advance_heads(
            *(functools.partial(self._advance, own), DELTA_ATTENTION),
            *(vectors, (qkv, f, b), pages, context),
            is_split=is_split,
        )
        kept = map(context.kept, (out, gate))
        return context.of_kept().by_token(self._gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        is_split = self.config.channels.is_split(context.kernels.num_shards)
        attended = context.kernels.split_last(attended, "heads" if is_split else None)
        return self.o_proj(attended, context)

    def _advance(
        self,
        config: KimiDeltaConfig,
        vectors: _Vectors,
        arrays: tuple[jax.Array, jax.Array, jax.Array],
        states: tuple[jax.Array, jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:  # f32[num_tokens, width], and the states
        """The convolution and the scan of its outputs, as `AdvanceHeads`.

        Args:
            config: Counts the heads of `arrays`: all, or those of one device.
        """
        qkv, f, b = arrays
        qkv, window = self.conv1d.convolve(vectors.conv1d, qkv, states[0], state, context)
        q, k, v = (_heads(x, config) for x in jnp.split(qkv, 3, axis=1))
        out, scanned = pallas_kernels.gated_delta_rule(
            with_length_one(q) * config.head_dim**-0.5,
            *(with_length_one(k), v),
            _log_decay(f, vectors, config),
            jax.nn.sigmoid(b.astype(jnp.float32)),
            states[1],
            state.query_start_loc,
            positions=context.scan_positions,
            state_ends=state.state_ends,
            has_one_token_each=state.has_one_token_each,
            target=context.kernels.target,
        )
        return out.reshape(out.shape[0], -1), (window, scanned)

    def _gate(
        self,
        out: jax.Array,  # f32[num_rows, width]
        gate: jax.Array,  # f[num_rows, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, width]
        heads = _heads(out, self.config)
        mean = (heads * heads).mean(axis=-1, keepdims=True)
        scaled = self.scale[...].astype(jnp.float32) * heads * jax.lax.rsqrt(mean + self.config.eps)
        factors = jax.nn.sigmoid(gate.astype(jnp.float32))
        return (scaled.reshape(out.shape) * factors).astype(gate.dtype)


def _log_decay(
    f: jax.Array,  # f[num_tokens, width]
    vectors: _Vectors,
    config: KimiDeltaConfig,
) -> jax.Array:  # f32[num_tokens, num_heads, head_dim]
    raw = _heads(f.astype(jnp.float32) + vectors.dt_bias, config)
    rate = jnp.exp(vectors.A_log)[:, None]
    if config.min_log_decay is None:
        return -rate * jax.nn.softplus(raw)
    return config.min_log_decay * jax.nn.sigmoid(rate * raw)


def _heads(
    x: jax.Array,  # [num_tokens, width]
    config: KimiDeltaConfig,
) -> jax.Array:  # [num_tokens, num_heads, head_dim]
    return x.reshape(x.shape[0], config.num_heads, config.head_dim)


def _flattened(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    (weight_np,) = weights_np
    return weight_np.reshape(-1)
