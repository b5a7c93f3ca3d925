"""AltUp: several residual streams, of which each layer computes one and corrects the others."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.forward.layer_context import LayerContext
from models.layers.factors import Factors
from models.layers.linear import Linear
from models.layers.rms_norm import RoundedLastRMSNorm


class AltUp(nnx.Module):
    """Predicts all streams after a layer. Corrects them once the layer has computed one of them.

    Source: arXiv:2301.13310.
    """

    def __init__(
        self, hidden_size: int, num_streams: int, *, active_idx: int, eps: float, dtype: jnp.dtype
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            active_idx: The stream that layers compute.
            eps: Of the norm of the router's input.
        """
        self.router_norm = RoundedLastRMSNorm(hidden_size, eps=eps, dtype=dtype)
        self.modality_router = Linear(hidden_size, num_streams, dtype=dtype)
        self.prediction_coefs = Linear(num_streams, num_streams**2, dtype=dtype)
        self.correction_coefs = Linear(num_streams, num_streams, dtype=dtype)
        self.correct_output_scale = Factors(hidden_size, dtype=dtype)
        self.active_idx = active_idx

    def predict(
        self,
        streams: jax.Array,  # f[num_rows, num_streams, hidden]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, num_streams, hidden]
        num_streams = streams.shape[1]
        routed = self._route(streams[:, self.active_idx], context)
        coefs = self.prediction_coefs(routed, context).reshape(-1, num_streams, num_streams)
        mixed = jnp.einsum("rij,rjh->rih", coefs, streams, preferred_element_type=jnp.float32)
        return mixed.astype(streams.dtype) + streams

    def correct(
        self,
        predictions: jax.Array,  # f[num_rows, num_streams, hidden]
        computed: jax.Array,  # f[num_rows, hidden], the active stream after the layer
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, num_streams, hidden]
        coefs = self.correction_coefs(self._route(computed, context), context) + 1
        innovation = computed - predictions[:, self.active_idx]
        return innovation[:, None, :] * coefs[:, :, None] + predictions

    def _route(self, x: jax.Array, context: LayerContext) -> jax.Array:
        routed = self.modality_router(self.router_norm(x) * x.shape[-1] ** -1.0, context)
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)


def with_magnitude_of(
    x: jax.Array,  # f[num_rows, hidden]
    target: jax.Array,  # f[num_rows, hidden]
) -> jax.Array:  # f[num_rows, hidden]
    """x, with the root mean square of each row of `target`."""
    own = jnp.sqrt(jnp.maximum(_mean_of_squares(x), 1e-5))
    wanted = jnp.sqrt(_mean_of_squares(target))
    return (x.astype(jnp.float32) * wanted / own).astype(x.dtype)


def _mean_of_squares(x: jax.Array) -> jax.Array:  # f[num_rows, hidden] -> f32[num_rows, 1]
    return jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)
