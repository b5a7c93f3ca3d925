"""`KimiDeltaAttention`: the gated delta rule with a decay for each dimension of keys."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.forward.layer_context import LayerContext, LayerState
from models.layers.advance_states import advance_states
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

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs, and the state."""
        window = (self.kernel_size - 1, 3 * self.width)
        return StateFormat(
            shapes=(window, (self.num_heads, self.head_dim, self.head_dim)),
            num_windows=1,
            step_op="gated_delta_step",
        )


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
        self.in_proj = Linear(
            config.hidden_size, sum(self._widths.values()), axes=(None, "heads"), dtype=dtype
        )
        self.conv1d = ShortConvolution(3 * width, config.kernel_size, dtype=dtype)
        if config.has_inner_vectors:
            self.f_b_proj = Linear(config.head_dim, width, axes=(None, "heads"), dtype=dtype)
            self.g_b_proj = Linear(config.head_dim, width, axes=(None, "heads"), dtype=dtype)
        self.dt_bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.A_log = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((config.head_dim,), dtype))
        self.o_proj = Linear(width, config.hidden_size, axes=("heads", None), dtype=dtype)

    @property
    def _widths(self) -> dict[str, int]:
        """Name of each part of `in_proj` in checkpoints -> its width."""
        widths = dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.config.width)
        if self.config.has_inner_vectors:
            widths |= dict.fromkeys(("f_a_proj", "g_a_proj"), self.config.head_dim)
        else:
            widths |= dict.fromkeys(("f_proj", "g_proj"), self.config.width)
        return widths | {"b_proj": self.config.num_heads}

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
        rules = {
            leaf: WeightRule(sources=(source,), layout="vector", axes=(None,), combine=_flattened)
            for leaf, source in vectors.items()
        }
        projections = tuple(
            Source(name=f"{name}.{part}.weight", shape=(width, config.hidden_size))
            for part, width in self._widths.items()
        )
        rules["in_proj.kernel"] = WeightRule(
            sources=projections, layout="matrix", axes=(None, "heads"), combine=np.concatenate
        )
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

        def project(hidden: jax.Array, context: LayerContext) -> tuple[jax.Array, ...]:
            # The state is whole on each device of a mesh.
            qkv, f, g, b = self._parts(
                context.kernels.split_last(self.in_proj(norm(hidden), context), None)
            )
            if self.config.has_inner_vectors:
                f, g = (
                    context.kernels.split_last(project(y, context), None)
                    for project, y in ((self.f_b_proj, f), (self.g_b_proj, g))
                )
            return qkv, f, g, b

        qkv, f, gate, b = context.by_token(project, hidden)
        out, pages = advance_states(self._advance, DELTA_ATTENTION, (qkv, f, b), pages, context)
        kept = map(context.kept, (out, gate))
        return context.of_kept().by_token(self._gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        attended = context.kernels.split_last(attended, None)
        return self.o_proj(attended, context)

    def _advance(
        self,
        arrays: tuple[jax.Array, jax.Array, jax.Array],
        states: tuple[jax.Array, jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:  # f32[num_tokens, width], and the states
        """The convolution and the scan of its outputs, as `Advance`."""
        qkv, f, b = arrays
        qkv, window = self.conv1d(qkv, states[0], state, context)
        q, k, v = map(self._heads, jnp.split(qkv, 3, axis=1))
        out, scanned = pallas_kernels.gated_delta_rule(
            with_length_one(q) * self.config.head_dim**-0.5,
            *(with_length_one(k), v),
            self._log_decay(f),
            jax.nn.sigmoid(b.astype(jnp.float32)),
            states[1],
            state.query_start_loc,
            positions=context.scan_positions,
            state_ends=state.state_ends,
            has_one_token_each=state.has_one_token_each,
            target=context.kernels.target,
        )
        return out.reshape(out.shape[0], -1), (window, scanned)

    def _parts(self, projected: jax.Array) -> tuple[jax.Array, ...]:
        """Queries, keys and values; decays and gates or their inner vectors; and `b`."""
        widths = list(self._widths.values())
        ends = np.cumsum([sum(widths[:3]), *widths[3:-1]])
        return tuple(jnp.split(projected, ends, axis=1))

    def _log_decay(self, f: jax.Array) -> jax.Array:  # f32[num_tokens, num_heads, head_dim]
        raw = self._heads(f.astype(jnp.float32) + self.dt_bias[...])
        rate = jnp.exp(self.A_log[...])[:, None]
        if self.config.min_log_decay is None:
            return -rate * jax.nn.softplus(raw)
        return self.config.min_log_decay * jax.nn.sigmoid(rate * raw)

    def _heads(self, x: jax.Array) -> jax.Array:  # [num_tokens, num_heads, head_dim]
        return x.reshape(x.shape[0], self.config.num_heads, self.config.head_dim)

    def _gate(
        self,
        out: jax.Array,  # f32[num_rows, width]
        gate: jax.Array,  # f[num_rows, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, width]
        heads = self._heads(out)
        mean = (heads * heads).mean(axis=-1, keepdims=True)
        scaled = self.scale[...].astype(jnp.float32) * heads * jax.lax.rsqrt(mean + self.config.eps)
        factors = jax.nn.sigmoid(gate.astype(jnp.float32))
        return (scaled.reshape(out.shape) * factors).astype(gate.dtype)


def _flattened(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    (weight_np,) = weights_np
    return weight_np.reshape(-1)
