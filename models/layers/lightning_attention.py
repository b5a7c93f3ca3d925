"""`LightningAttention`: linear attention with a constant decay per head."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.config.dense_config import Activation
from models.forward.layer_context import LayerContext, LayerState
from models.layers.advance_states import advance_states
from models.layers.linear import Linear
from models.layers.mlp import activate
from models.layers.rms_norm import RMSNorm
from models.layers.self_attention import Norm
from models.weight_rule import Source, WeightRule

# The name of the layer's cache of states.
LIGHTNING = "lightning_attn"
_NORM_EPS = 1e-6  # in all releases


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningConfig:
    """The sizes of a `LightningAttention`."""

    hidden_size: int
    num_heads: int
    head_dim: int
    activation: Activation  # of queries, keys and values

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    def format(self) -> StateFormat:
        """The sum of the products of values and keys, with their decays."""
        shape = (self.num_heads, self.head_dim, self.head_dim)
        return StateFormat(shapes=(shape,), step_op="ssd_step")


class LightningAttention(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    Source: MiniMax-01, arXiv:2501.08313, section 2.2.
    """

    def __init__(self, config: LightningConfig, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.config = config
        width = config.width
        self.qkv_proj = Linear(config.hidden_size, 3 * width, axes=(None, "heads"), dtype=dtype)
        self.output_gate = Linear(config.hidden_size, width, axes=(None, "heads"), dtype=dtype)
        self.norm = RMSNorm(width, eps=_NORM_EPS, dtype=dtype)
        self.out_proj = Linear(width, config.hidden_size, axes=("heads", None), dtype=dtype)
        # A head's decay per token is `exp(-exp(log_slope))`. The rule of this parameter is
        # `slope_rule`.
        self.log_slopes = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32))

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
            normed = norm(hidden)
            projected = self.qkv_proj(normed, context), self.output_gate(normed, context)
            # The state is whole on each device of a mesh.
            return tuple(context.kernels.split_last(y, None) for y in projected)

        qkv, gate = context.by_token(project, hidden)
        out, pages = advance_states(self._advance, LIGHTNING, (qkv,), pages, context)
        kept = map(context.kept, (out, gate))
        return context.of_kept().by_token(self._gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        attended = context.kernels.split_last(attended, None)
        return self.out_proj(attended, context)

    def _advance(
        self,
        arrays: tuple[jax.Array],
        states: tuple[jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array]]:  # f32[num_tokens, width], and the states
        """The scan, as `Advance`."""
        qkv = activate(arrays[0], self.config.activation)
        # A row has query, key and value of the first head, then of the second head, and so on.
        heads = qkv.reshape(qkv.shape[0], self.config.num_heads, -1)
        q, k, v = jnp.split(heads, 3, axis=2)
        out, scanned = pallas_kernels.ssd_scan(
            *(v, k, q),
            jnp.broadcast_to(-jnp.exp(self.log_slopes[...]), heads.shape[:2]),
            *states,
            state.query_start_loc,
            positions=context.scan_positions,
            state_ends=state.state_ends,
            has_one_token_each=state.has_one_token_each,
            target=context.kernels.target,
        )
        return out.reshape(out.shape[0], -1), (scanned,)

    def _gate(
        self,
        out: jax.Array,  # f32[num_rows, width]
        gate: jax.Array,  # f[num_rows, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, width]
        factors = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(gate.dtype)
        return factors * self.norm(out.astype(gate.dtype))


def slope_rule(name: str, num_heads: int, *, layer_idx: int, num_layers: int) -> WeightRule:
    """The rule of `log_slopes` of one layer. If the checkpoint has no slopes, they are computed.

    Args:
        name: The layer's name in the checkpoint.
    """
    exponents_np = -8 / num_heads * np.arange(1, num_heads + 1)
    share = 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5
    slopes_np = (2.0**exponents_np * share).astype(np.float32)

    def combine(weights_np: Sequence[np.ndarray]) -> np.ndarray:
        return np.log(weights_np[0].reshape(-1) if weights_np else slopes_np)

    source = Source(name=f"{name}.slope_rate", shape=(num_heads, 1, 1), is_optional=True)
    return WeightRule(sources=(source,), layout="vector", axes=(None,), combine=combine)
