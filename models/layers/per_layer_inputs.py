"""Token embeddings of single layers, which layers get in addition to the residual stream."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.forward.carry import Carry
from models.forward.layer_context import LayerContext


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerCarry(Carry):
    """The residual stream, and the tokens' embeddings for each layer."""

    per_layer_inputs: jax.Array  # f[num_tokens, num_layers, per_layer_size]

    def own_inputs(self, context: LayerContext) -> jax.Array:  # f[num_tokens, per_layer_size]
        """The embeddings for the layer of this context."""
        return jax.lax.dynamic_index_in_dim(
            self.per_layer_inputs, context.layer_idx, axis=1, keepdims=False
        )


def mix_per_layer_inputs(
    embedded: jax.Array,  # f[num_tokens, num_layers * per_layer_size]
    projected: jax.Array,  # f[num_tokens, num_layers * per_layer_size]
    *,
    num_layers: int,
    hidden_size: int,
    norm: nnx.Module,
) -> jax.Array:  # f[num_tokens, num_layers, per_layer_size]
    """Adds the tokens' embeddings for each layer to a projection of their usual embeddings.

    Args:
        norm: Of the scaled projection, over `per_layer_size`.

    Source: huggingface.co/docs/transformers/model_doc/gemma3n.
    """
    shape = (embedded.shape[0], num_layers, -1)
    projected = norm(scaled(projected, hidden_size**-0.5).reshape(shape))
    return scaled(projected + embedded.reshape(shape), 0.5**0.5)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """`x * factor`, computed in float32 and rounded once."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
