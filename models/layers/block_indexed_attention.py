"""`BlockIndexedAttention`: attention of each token to the blocks that an index chooses."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.block_index_config import BlockIndexedConfig
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.block_index import BlockIndexer
from models.layers.gated_attention import GatedAttention
from models.layers.rotary import Rotate, apply_rotary
from models.layers.self_attention import Norm
from models.layers.sparse_attend import attend_to_positions, write_keys_and_values


class BlockIndexedAttention(Attention):
    """Attention to few blocks of earlier tokens, and to the tokens after the last whole block.

    If no request can have more blocks than are chosen, there is no index.
    """

    def __init__(
        self,
        config: BlockIndexedConfig,
        *,
        q_norm: nnx.Module | None = None,
        k_norm: nnx.Module | None = None,
        rotate: Rotate = apply_rotary,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in; the arguments are as in `Attention`."""
        super().__init__(config, q_norm=q_norm, k_norm=k_norm, rotate=rotate, dtype=dtype)
        self.indexer = None if config.attends_to_all else BlockIndexer(config, dtype=dtype)

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        if self.indexer is None:
            return super().__call__(hidden, pages, context, norm=norm)

        def project_index(
            hidden: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
        ) -> tuple[jax.Array, jax.Array]:
            return self.indexer.project(norm(hidden), cos, sin, context)

        cos_sin = context.cos_sin[self.config.rotary]
        index_q, index_keys = context.by_token(project_index, hidden, *cos_sin)
        q, k, v = self.project_in(hidden, context, norm=norm)
        pages = write_keys_and_values(k, v, pages, context)
        pages = self.indexer.write(index_keys, pages, context)
        kept = map(context.kept, (index_q, context.batch.positions))
        positions = self.indexer.choose(*kept, pages, context)
        return attend_to_positions(self.config, q, positions, pages, context), pages


class GatedBlockIndexedAttention(GatedAttention, BlockIndexedAttention):
    """`BlockIndexedAttention` with the gate of `GatedAttention`."""
