"""`LightningAttention`: linear attention with a constant decay per head."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.config.dense_config import Activation
from models.forward.layer_context import LayerContext, LayerState
from models.head_split import HeadRange, HeadSplit, heads_on_each, num_parts
from models.layers.advance_states import advance_heads
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

    def split(self, head_dim: int) -> HeadSplit:
        """An axis with this many entries for each head."""
        return _split(self.num_heads, head_dim)

    def on_each_of(self, num_devices: int) -> "LightningConfig":
        """The heads of one device."""
        parts = num_parts((self.num_heads,), num_devices)
        return replace(self, num_heads=heads_on_each(self.num_heads, parts))

    def format(self) -> StateFormat:
        """The sum of the products of values and keys, with their decays."""
        shape = (self.num_heads, self.head_dim, self.head_dim)
        return StateFormat(shapes=(shape,), step_op="ssd_step", heads=((0, self.split(1)),))


class LightningAttention(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    Source: MiniMax-01, arXiv:2501.08313, section 2.2.
    """

    def __init__(self, config: LightningConfig, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.config = config
        width = config.width
        # Query, key and value of the first head, then of the second head, and so on.
        qkv = config.split(3 * config.head_dim)
        self.qkv_proj = Linear(
            config.hidden_size, qkv.size, axes=(None, "heads"), heads=qkv, dtype=dtype
        )
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
        num_devices = context.kernels.num_shards
        own = self.config.on_each_of(num_devices)
        is_split = self.config.split(1).is_split(num_devices)

        def project(hidden: jax.Array, context: LayerContext) -> tuple[jax.Array, ...]:
            normed = norm(hidden)
            projected = self.qkv_proj(normed, context), self.output_gate(normed, context)
            axis = "heads" if is_split else None
            return tuple(context.kernels.split_last(y, axis) for y in projected)

        qkv, gate = context.by_token(project, hidden)
        out, pages = advance_heads(
            *(functools.partial(self._advance, own), LIGHTNING),
            *((self.log_slopes[...],), (qkv,), pages, context),
            is_split=is_split,
        )
        kept = map(context.kept, (out, gate))
        return context.of_kept().by_token(self._gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        is_split = self.config.split(1).is_split(context.kernels.num_shards)
        attended = context.kernels.split_last(attended, "heads" if is_split else None)
        return self.out_proj(attended, context)

    def _advance(
        self,
        config: LightningConfig,
        vectors: tuple[jax.Array],
        arrays: tuple[jax.Array],
        states: tuple[jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array]]:  # f32[num_tokens, width], and the states
        """The scan, as `AdvanceHeads`.

        Args:
            config: Counts the heads of `arrays`: all, or those of one device.
            vectors: `log_slopes`.
        """
        qkv = activate(arrays[0], config.activation)
        heads = qkv.reshape(qkv.shape[0], config.num_heads, -1)
        q, k, v = jnp.split(heads, 3, axis=2)
        out, scanned = pallas_kernels.ssd_scan(
            *(v, k, q),
            jnp.broadcast_to(-jnp.exp(vectors[0]), heads.shape[:2]),
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
    return WeightRule(
        sources=(source,),
        layout="vector",
        axes=(None,),
        combine=combine,
        heads=_split(num_heads, 1),
    )


def _split(num_heads: int, head_dim: int) -> HeadSplit:
    heads = HeadRange(num_heads=num_heads, head_dim=head_dim)
    return HeadSplit(ranges=(heads,), heads_of_layer=(num_heads,))
