"""`LearnedPositionsDecoder`: a decoder that adds a trained vector for each position."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.dense_config import LayerNormConfig
from models.decoders.dense_decoder import DenseDecoder
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.weight_rule import Source, WeightRule


class PositionEmbedding(nnx.Module):
    """Position to row of a trained table, f[max_position_embeddings + offset, hidden].

    Args:
        offset: The number of rows before the row of position 0.
    """

    def __init__(self, num_positions: int, hidden_size: int, *, offset: int, dtype: jnp.dtype):
        self.table = nnx.Param(jnp.zeros((num_positions + offset, hidden_size), dtype))
        self.offset = offset

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.weight", shape=self.table.get_value().shape)
        return {"table": WeightRule(sources=(source,), layout="table", axes=(None, None))}

    def __call__(
        self,
        positions: jax.Array,  # i32[num_tokens], in [0, num_positions)
    ) -> jax.Array:  # f[num_tokens, hidden]
        # Padding tokens may have positions past the table.
        rows = jnp.minimum(positions + self.offset, self.table.shape[0] - 1)
        return self.table[...][rows]


class LearnedPositionsDecoder(DenseDecoder):
    """`DenseDecoder` without rotary embeddings. Its requests cannot be longer than its table."""

    def __init__(
        self,
        config: LayerNormConfig,
        *,
        position_offset: int = 0,
        dtype: jnp.dtype,
        **parts: object,
    ) -> None:
        """Makes the model with weights to be filled in.

        Args:
            position_offset: As in `PositionEmbedding`.
            parts: The other arguments of `DenseDecoder`.
        """
        super().__init__(config, dtype=dtype, **parts)
        self.embed_positions = PositionEmbedding(
            config.max_position_embeddings,
            config.hidden_size,
            offset=position_offset,
            dtype=dtype,
        )

    def embed(self, context: LayerContext) -> Carry:
        """See `Decoder.embed`."""
        hidden = super().embed(context).hidden
        return Carry(hidden=hidden + self.embed_positions(context.batch.positions))
