"""Several residual streams: layers read a mix of them, and add their output to each of them."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.rms_norm import OffsetRMSNorm
from models.layers.self_attention import SelfAttention


class StreamNorm(OffsetRMSNorm):
    """`OffsetRMSNorm` of each stream, with an offset for each feature of each stream."""

    def __call__(
        self,
        streams: jax.Array,  # f[num_rows, num_streams, hidden]
    ) -> jax.Array:  # f[num_rows, num_streams, hidden]
        offset = self.offset[...].reshape(streams.shape[1:])
        return self.normed(streams, offset)


class StreamMixer(nnx.Module):
    """Multiplies each feature of the normed streams by a gate, and returns the streams' mean.

    The gates are computed from all streams.
    """

    def __init__(
        self, hidden_size: int, num_streams: int, *, rank: int, eps: float, dtype: jnp.dtype
    ) -> None:
        """Makes the mixer with weights to be filled in.

        Args:
            rank: The inner width of the gates.
        """
        width = hidden_size * num_streams
        self.hc_norm = StreamNorm(width, eps=eps, dtype=dtype)
        self.input_mix_weight_down = Linear(width, rank, dtype=dtype)
        self.input_mix_weight_up = Linear(rank, width, dtype=dtype)
        self.num_streams = num_streams

    def __call__(
        self,
        streams: jax.Array,  # f[num_rows, num_streams, hidden]
    ) -> jax.Array:  # f[num_rows, hidden]
        """The mix of the last layer's streams, in place of a last norm."""

        def multiply(linear: Linear, x: jax.Array) -> jax.Array:
            return linear.product(x).astype(x.dtype)

        return self._mix(self.hc_norm(streams), multiply)

    def _mix(
        self,
        normed: jax.Array,  # f[num_rows, num_streams, hidden]
        multiply: Callable[[Linear, jax.Array], jax.Array],
    ) -> jax.Array:  # f[num_rows, hidden]
        down = multiply(self.input_mix_weight_down, _joined(normed)) / self.num_streams
        up = multiply(self.input_mix_weight_up, jax.nn.silu(down))
        gated = jax.nn.sigmoid(up).reshape(normed.shape) * normed
        return gated.astype(jnp.float32).mean(axis=1).astype(normed.dtype)


class StreamConnection(StreamMixer):
    """A `StreamMixer` that also computes each stream's share of the layer's output.

    Source: hyper-connections, arXiv:2409.19606.
    """

    def __init__(
        self, hidden_size: int, num_streams: int, *, rank: int, eps: float, dtype: jnp.dtype
    ) -> None:
        super().__init__(hidden_size, num_streams, rank=rank, eps=eps, dtype=dtype)
        self.block_inject_weight = Linear(hidden_size * num_streams, num_streams, dtype=dtype)

    def __call__(
        self,
        streams: jax.Array,  # f[num_rows, num_streams, hidden]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:  # f[num_rows, hidden], f[num_rows, num_streams]
        normed = self.hc_norm(streams)
        shares = self.block_inject_weight(_joined(normed), context) / self.num_streams
        mixed = self._mix(normed, lambda linear, x: linear(x, context))
        return mixed, 2 * jax.nn.sigmoid(shares)


class StreamsLayer(nnx.Module):
    """Attention, or a recurrent mixer, and then an MLP: each with a `StreamConnection`."""

    def __init__(
        self,
        *,
        attention: SelfAttention,
        mlp: MLP,
        attn_hyper_connection: StreamConnection,
        mlp_hyper_connection: StreamConnection,
    ) -> None:
        self.self_attn = attention
        self.mlp = mlp
        self.attn_hyper_connection = attn_hyper_connection
        self.mlp_hyper_connection = mlp_hyper_connection

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        """Runs the layer.

        Args:
            carry: `hidden` is f[num_tokens, num_streams, hidden].
        """
        mixed, shares = context.by_token(self.attn_hyper_connection, carry.hidden)
        # The connection has normed its result.
        attended, pages = self.self_attn(mixed, pages, context, norm=lambda x: x)
        kept = map(context.kept, (carry.hidden, shares))
        hidden = context.of_kept().by_token(self._add_parts, *kept, attended)
        return replace(carry, hidden=hidden), pages

    def _add_parts(
        self,
        streams: jax.Array,  # f[num_queries, num_streams, hidden]
        shares: jax.Array,  # f[num_queries, num_streams]
        attended: jax.Array,  # f[num_queries, ...]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, num_streams, hidden]
        streams = _add_shares(streams, self.self_attn.project_out(attended, context), shares)
        mixed, shares = self.mlp_hyper_connection(streams, context)
        return _add_shares(streams, self.mlp(mixed, context), shares)


def _add_shares(streams: jax.Array, out: jax.Array, shares: jax.Array) -> jax.Array:
    return streams + out[:, None, :] * shares[:, :, None]


def _joined(streams: jax.Array) -> jax.Array:
    return streams.reshape(streams.shape[0], -1)
