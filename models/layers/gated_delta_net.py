"""`GatedDeltaNet`: a recurrence with the gated delta rule, in place of attention."""

import functools
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.forward.kernel_settings import TOKENS_BY_FEATURE
from models.forward.layer_context import LayerContext, LayerState
from models.head_split import HeadRange, HeadSplit, heads_on_each, num_parts
from models.layers.advance_states import advance_heads
from models.layers.linear import Linear
from models.layers.self_attention import Norm
from models.layers.short_convolution import ShortConvolution
from models.weight_rule import Source, WeightRule

# The name of the layer's cache of states. Checkpoints also have it in the names of weights.
LINEAR_ATTENTION = "linear_attn"
# Under the root of a key's or query's length.
_LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetConfig:
    """The sizes of a `GatedDeltaNet`. Each key head serves consecutive value heads."""

    hidden_size: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int  # width of a key head and of a query head
    v_dim: int  # width of a value head
    kernel_size: int  # of the convolution
    eps: float  # of the norm of each head's output
    max_beta: float = 1.0  # with 2, a token may turn the value of its key around
    state_dtype: str = "float32"  # in memory
    gate: Literal["silu", "sigmoid"] = "silu"  # the activation of the output's gate

    @property
    def k_width(self) -> int:
        """Width of all keys together."""
        return self.num_k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        """Width of all values together."""
        return self.num_v_heads * self.v_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.k_width + self.v_width

    @property
    def heads_of_layer(self) -> tuple[int, int]:
        return self.num_v_heads, self.num_k_heads

    @property
    def keys(self) -> HeadRange:
        """The entries of all keys, and of all queries."""
        return HeadRange(num_heads=self.num_k_heads, head_dim=self.k_dim)

    @property
    def values(self) -> HeadRange:
        return HeadRange(num_heads=self.num_v_heads, head_dim=self.v_dim)

    @property
    def numbers(self) -> HeadRange:
        """One number for each value head."""
        return HeadRange(num_heads=self.num_v_heads, head_dim=1)

    def split(self, *ranges: HeadRange) -> HeadSplit:
        return HeadSplit(ranges=ranges, heads_of_layer=self.heads_of_layer)

    @property
    def channels(self) -> HeadSplit:
        return self.split(self.keys, self.keys, self.values)

    def on_each_of(self, num_devices: int) -> "GatedDeltaNetConfig":
        """The heads of one device."""
        parts = num_parts(self.heads_of_layer, num_devices)
        return replace(
            self,
            num_k_heads=heads_on_each(self.num_k_heads, parts),
            num_v_heads=heads_on_each(self.num_v_heads, parts),
        )

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs, and the state."""
        window = (self.kernel_size - 1, self.num_channels)
        return StateFormat(
            shapes=(window, (self.num_v_heads, self.k_dim, self.v_dim)),
            num_windows=1,
            state_dtype=self.state_dtype,
            heads=((1, self.channels), (0, self.split(self.numbers))),
            step_op="gated_delta_step",
        )


class _Vectors(NamedTuple):
    """Weights of all heads, or of the heads of one device."""

    conv1d: tuple[jax.Array, jax.Array | None]
    dt_bias: jax.Array  # f[num_v_heads]
    A_log: jax.Array  # f32[num_v_heads]


class GatedDeltaNet(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    The family makes the weight rules of `in_proj_qkvz` and `in_proj_ba`, because checkpoints differ
    in the order of their outputs. Here the order is queries, keys, values and gates, each of all
    heads; and `b` and `a` of all value heads.

    Source: arXiv:2412.06464.
    """

    def __init__(self, config: GatedDeltaNetConfig, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.config = config
        qkvz = config.split(*config.channels.ranges, config.values)
        ba = config.split(config.numbers, config.numbers)
        self.in_proj_qkvz, self.in_proj_ba = (
            Linear(config.hidden_size, heads.size, axes=(None, "heads"), heads=heads, dtype=dtype)
            for heads in (qkvz, ba)
        )
        self.conv1d = ShortConvolution(
            config.num_channels, config.kernel_size, heads=config.channels, dtype=dtype
        )
        self.dt_bias = nnx.Param(jnp.zeros((config.num_v_heads,), dtype))
        self.A_log = nnx.Param(jnp.zeros((config.num_v_heads,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((config.v_dim,), dtype))
        self.out_proj = Linear(
            config.v_width, config.hidden_size, axes=("heads", None), dtype=dtype
        )

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        numbers = self.config.split(self.config.numbers)
        sources = {
            "dt_bias": (f"{name}.dt_bias", numbers.size, numbers),
            "A_log": (f"{name}.A_log", numbers.size, numbers),
            "scale": (f"{name}.norm.weight", self.config.v_dim, None),
        }
        return {
            leaf: WeightRule(
                sources=(Source(name=stored, shape=(size,)),),
                layout="vector",
                axes=(None,),
                heads=heads,
            )
            for leaf, (stored, size, heads) in sources.items()
        }

    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, Pages]:
        """Returns the input of `project_out`, f[num_queries, v_width], and the pages."""
        num_devices = context.kernels.num_shards
        own = self.config.on_each_of(num_devices)
        is_split = self.config.channels.is_split(num_devices)

        def project(hidden: jax.Array, context: LayerContext) -> tuple[jax.Array, ...]:
            normed = norm(hidden)
            projected = self.in_proj_qkvz(normed, context), self.in_proj_ba(normed, context)
            axis = "heads" if is_split else None
            return tuple(context.kernels.split_last(y, axis) for y in projected)

        qkvz, ba = context.by_token(project, hidden)
        qkv, z = context.kernels.cut_features(
            *(qkvz, (own.num_channels, own.v_width)),
            [TOKENS_BY_FEATURE] * 2 if is_split else None,
        )
        vectors = _Vectors(self.conv1d.vectors, self.dt_bias[...], self.A_log[...])
        out, pages = advance_heads(
            *(functools.partial(self._advance, own), LINEAR_ATTENTION),
            *(vectors, (qkv, ba), pages, context),
            is_split=is_split,
        )
        kept = map(context.kept, (out, z))
        return context.of_kept().by_token(self._gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, v_width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        is_split = self.config.channels.is_split(context.kernels.num_shards)
        attended = context.kernels.split_last(attended, "heads" if is_split else None)
        return self.out_proj(attended, context)

    def _advance(
        self,
        config: GatedDeltaNetConfig,
        vectors: _Vectors,
        arrays: tuple[jax.Array, jax.Array],
        states: tuple[jax.Array, jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:  # f32[num_tokens, v_width], and the states
        """The convolution and the scan of its outputs, as `AdvanceHeads`.

        Args:
            config: Counts the heads of `arrays`: all, or those of one device.
        """
        qkv, ba = arrays
        b, a = jnp.split(ba.astype(jnp.float32), 2, axis=1)
        qkv, window = self.conv1d.convolve(vectors.conv1d, qkv, states[0], state, context)
        step_size = jax.nn.softplus(a + vectors.dt_bias.astype(jnp.float32))
        out, scanned = pallas_kernels.gated_delta_rule(
            *_heads(qkv, config),
            -jnp.exp(vectors.A_log) * step_size,
            config.max_beta * jax.nn.sigmoid(b),
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
        out: jax.Array,  # f32[num_rows, v_width]
        z: jax.Array,  # f[num_rows, v_width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, v_width]
        heads = out.reshape(out.shape[0], -1, self.config.v_dim)
        mean = (heads * heads).mean(axis=-1, keepdims=True)
        # Rounded before it is scaled, as in transformers.
        normed = (heads * jax.lax.rsqrt(mean + self.config.eps)).astype(z.dtype)
        scaled = (self.scale[...] * normed).astype(jnp.float32).reshape(out.shape)
        gate = jax.nn.silu if self.config.gate == "silu" else jax.nn.sigmoid
        return (scaled * gate(z.astype(jnp.float32))).astype(z.dtype)


def _heads(
    qkv: jax.Array,  # f32[num_tokens, num_channels]
    config: GatedDeltaNetConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys f32[num_tokens, num_v_heads, k_dim]; values, with v_dim."""
    q, k, v = jnp.split(qkv, [config.k_width, 2 * config.k_width], axis=1)
    q, k = (x.reshape(x.shape[0], config.num_k_heads, config.k_dim) for x in (q, k))
    heads_per_key = config.num_v_heads // config.num_k_heads
    q, k = (jnp.repeat(with_length_one(x), heads_per_key, axis=1) for x in (q, k))
    return q * config.k_dim**-0.5, k, v.reshape(v.shape[0], -1, config.v_dim)


def with_length_one(x: jax.Array) -> jax.Array:
    """The vectors of the last axis, scaled to a length of 1."""
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _LENGTH_EPS)
