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
from models.forward.layer_context import LayerContext
from models.layers.gated_delta_net import with_length_one
from models.layers.linear import Linear
from models.layers.self_attention import Norm
from models.layers.short_convolution import ShortConvolution
from models.weight_rule import Source, WeightRule

# The name of the layer's cache of states.
DELTA_ATTENTION = "delta_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaConfig:
    """The sizes of a `KimiDeltaAttention`. Queries, keys and values have equal heads."""

    hidden_size: int
    num_heads: int
    head_dim: int
    kernel_size: int  # of the convolution
    eps: float  # of the norm of each head's output

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs, and the state."""
        window = (self.kernel_size - 1, 3 * self.width)
        return StateFormat(shapes=(window, (self.num_heads, self.head_dim, self.head_dim)))


class KimiDeltaAttention(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    Checkpoints have a matrix for each part of `in_proj`: queries, keys, values, the inner vectors
    of the decay and of the gate, and `b`. They have a convolution for each of the first three.

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
        self.f_b_proj = Linear(config.head_dim, width, axes=(None, "heads"), dtype=dtype)
        self.g_b_proj = Linear(config.head_dim, width, axes=(None, "heads"), dtype=dtype)
        self.dt_bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.A_log = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((config.head_dim,), dtype))
        self.o_proj = Linear(width, config.hidden_size, axes=("heads", None), dtype=dtype)

    @property
    def _widths(self) -> dict[str, int]:
        """Name of each part of `in_proj` in checkpoints -> its width."""
        width, head_dim = self.config.width, self.config.head_dim
        return {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), width),
            **dict.fromkeys(("f_a_proj", "g_a_proj"), head_dim),
            "b_proj": self.config.num_heads,
        }

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        config = self.config
        vectors = {
            "dt_bias": Source(name=f"{name}.dt_bias", shape=(config.width,)),
            "A_log": Source(name=f"{name}.A_log", shape=(1, 1, config.num_heads, 1)),
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
            f, g = self.f_b_proj(f, context), self.g_b_proj(g, context)
            return qkv, *(context.kernels.split_last(y, None) for y in (f, g)), b

        qkv, f, gate, b = context.by_token(project, hidden)
        state = context.state(DELTA_ATTENTION)
        window, states = context.read_state(state, pages)
        qkv, window = self.conv1d(qkv, window, state, context)
        q, k, v = map(self._heads, jnp.split(qkv, 3, axis=1))
        step_size = jax.nn.softplus(f.astype(jnp.float32) + self.dt_bias[...])
        out, states = pallas_kernels.gated_delta_rule(
            with_length_one(q) * self.config.head_dim**-0.5,
            *(with_length_one(k), v),
            -jnp.exp(self.A_log[...])[:, None] * self._heads(step_size),
            jax.nn.sigmoid(b.astype(jnp.float32)),
            states,
            state.query_start_loc,
            positions=context.scan_positions,
            has_one_token_each=state.has_one_token_each,
            target=context.kernels.target,
        )
        pages = context.write_state(state, pages, (window, states))
        kept = map(context.kept, (out.reshape(out.shape[0], -1), gate))
        return context.of_kept().by_token(self._gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        attended = context.kernels.split_last(attended, None)
        return self.o_proj(attended, context)

    def _parts(self, projected: jax.Array) -> tuple[jax.Array, ...]:
        """Queries, keys and values; the inner vectors of decay and gate; and `b`."""
        qkv_width, head_dim = 3 * self.config.width, self.config.head_dim
        ends = np.cumsum([qkv_width, head_dim, head_dim])
        return tuple(jnp.split(projected, ends, axis=1))

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
