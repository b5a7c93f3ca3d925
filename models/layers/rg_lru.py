"""`RecurrentBlock`: a convolution and a real-gated linear recurrent unit, in place of attention."""

import functools
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
from models.layers.head_linear import HeadLinear
from models.layers.linear import Linear
from models.layers.mlp import activate
from models.layers.self_attention import Norm
from models.layers.short_convolution import ShortConvolution
from models.weight_rule import Source, WeightRule

# The name of the layer's cache of states.
RECURRENT = "recurrent"
# Decays are exp(-8 softplus(parameter) gate).
_DECAY_FACTOR = -8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentBlockConfig:
    """The sizes of a `RecurrentBlock`.

    Args:
        width: Channels of the convolution and of the recurrence.
        num_blocks: Equal groups of consecutive channels. Gates are projections within a group.
    """

    hidden_size: int
    width: int
    num_blocks: int
    kernel_size: int  # of the convolution
    activation: Activation  # of the branch that multiplies the output

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs, and the state."""
        return StateFormat(
            shapes=((self.kernel_size - 1, self.width), (self.width,)), num_windows=1
        )


class RecurrentBlock(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    Source: Griffin, arXiv:2402.19427, section 2.
    """

    def __init__(self, config: RecurrentBlockConfig, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.config = config
        hidden_size, width = config.hidden_size, config.width
        linear = functools.partial(Linear, use_bias=True, dtype=dtype)
        self.linear_x = linear(hidden_size, width, axes=(None, "heads"))
        self.linear_y = linear(hidden_size, width, axes=(None, "heads"))
        self.conv_1d = ShortConvolution(
            width, config.kernel_size, use_bias=True, has_silu=False, dtype=dtype
        )
        block_width = width // config.num_blocks
        self.input_gate, self.recurrent_gate = (
            HeadLinear(config.num_blocks, block_width, block_width, dtype=dtype) for _ in range(2)
        )
        self.input_bias, self.recurrent_bias, self.decay = (
            nnx.Param(jnp.zeros((width,), dtype)) for _ in range(3)
        )
        self.linear_out = linear(width, hidden_size, axes=("heads", None))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`. Checkpoints store gates as [num_blocks, in, out]."""
        width, num_blocks = self.config.width, self.config.num_blocks
        dims = (num_blocks, width // num_blocks)

        def vector(stored: str, shape: tuple[int, ...]) -> WeightRule:
            source = Source(name=f"{name}.rg_lru.{stored}", shape=shape)
            return WeightRule(sources=(source,), layout="vector", axes=(None,), combine=_flat)

        def gate(stored: str) -> WeightRule:
            source = Source(name=f"{name}.rg_lru.{stored}", shape=(*dims, dims[1]))
            axes = (None, None, None)
            return WeightRule(sources=(source,), layout="heads", axes=axes, combine=_turned)

        return {
            "input_gate.kernel": gate("input_gate_weight"),
            "recurrent_gate.kernel": gate("recurrent_gate_weight"),
            "input_bias": vector("input_gate_bias", dims),
            "recurrent_bias": vector("recurrent_gate_bias", dims),
            "decay": vector("recurrent_param", (width,)),
        }

    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, Pages]:
        """Returns the input of `project_out`, f[num_queries, width], and the pages."""

        def project(hidden: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
            normed = norm(hidden)
            y = activate(self.linear_y(normed, context), self.config.activation)
            # The state is whole on each device of a mesh.
            return tuple(
                context.kernels.split_last(z, None) for z in (self.linear_x(normed, context), y)
            )

        x, y = context.by_token(project, hidden)
        arrays = (x, context.batch.positions)
        out, pages = advance_states(self._advance, RECURRENT, arrays, pages, context)
        return context.kept(out * y), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, width]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        attended = context.kernels.split_last(attended, None)
        return self.linear_out(attended, context)

    def _advance(
        self,
        arrays: tuple[jax.Array, jax.Array],
        states: tuple[jax.Array, jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:  # f[num_tokens, width], and the states
        """The convolution, the gates, and the scan of their outputs, as `Advance`."""
        projected, positions = arrays
        x, window = self.conv_1d(projected, states[0], state, context)
        x, log_decay = context.by_token(self._gate, x.astype(projected.dtype), positions)
        out, scanned = pallas_kernels.rg_lru_scan(
            x,
            log_decay,
            states[1],
            state.query_start_loc,
            state_ends=state.state_ends,
            has_one_token_each=state.has_one_token_each,
            target=context.kernels.target,
        )
        return out.astype(projected.dtype), (window, scanned)

    def _gate(
        self,
        x: jax.Array,  # f[num_rows, width]
        positions: jax.Array,  # i32[num_rows]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """The inputs and the logarithms of the decays of the recurrence, f32[num_rows, width]."""
        blocks = x.reshape(x.shape[0], self.config.num_blocks, -1)

        def gate(linear: HeadLinear, bias: nnx.Param) -> jax.Array:
            gates = linear(blocks, context).reshape(x.shape).astype(jnp.float32)
            return jax.nn.sigmoid(gates + bias[...].astype(jnp.float32))

        decay = jax.nn.softplus(self.decay[...].astype(jnp.float32))
        log_decay = _DECAY_FACTOR * gate(self.recurrent_gate, self.recurrent_bias) * decay
        inputs = x.astype(jnp.float32) * gate(self.input_gate, self.input_bias)
        # Inputs are scaled so that the state keeps its size. The first input of a request is not
        # scaled.
        factor = jnp.where(positions[:, None] == 0, 1.0, jnp.sqrt(1 - jnp.exp(2 * log_decay)))
        return inputs * factor, log_decay


def _flat(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    (weight_np,) = weights_np
    return weight_np.reshape(-1)


def _turned(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    (weight_np,) = weights_np
    return np.ascontiguousarray(weight_np.swapaxes(1, 2))
