"""`WeightedResidualLayer`: a layer that multiplies each feature of its residual stream."""

from collections.abc import Callable

import jax
from flax import nnx

from models.forward.layer_context import LayerContext
from models.layers.decoder_layers import PreNormLayer
from models.layers.mlp import MLP
from models.layers.self_attention import SelfAttention


class WeightedResidualLayer(PreNormLayer):
    """`PreNormLayer` that multiplies the residual stream before it adds to it (Doge)."""

    def __init__(
        self,
        *,
        attention: SelfAttention,
        mlp: MLP,
        norm: Callable[[], nnx.Module],
        factors: Callable[[], nnx.Module],
    ) -> None:
        """Makes the layer.

        Args:
            factors: Makes a layer that multiplies the residual stream, such as `Factors`.
        """
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        self.input_residual = factors()
        self.post_attention_residual = factors()

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        hidden = self.input_residual(hidden) + self.self_attn.project_out(attended, context)
        out = self.mlp(self.post_attention_layernorm(hidden), context)
        return self.post_attention_residual(hidden) + out
