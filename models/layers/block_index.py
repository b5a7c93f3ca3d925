"""`BlockIndexer`: scores blocks of tokens, and chooses the blocks that a token attends to.

The index cache has one vector per token. While a block is incomplete, these are the keys of its
tokens. When the block's last token is computed, the last vector becomes the key of the block: the
mean of the tokens' keys, normed and rotated. After that, no step reads the block's other vectors.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.config.block_index_config import BlockIndexedConfig
from models.config.index_config import INDEX_KEYS
from models.forward.kernel_settings import PAGES_BY_DEVICE, WHOLE
from models.forward.layer_context import LayerContext
from models.layers.attention import split_heads
from models.layers.latent_attend import write_vectors
from models.layers.linear import Linear
from models.layers.rms_norm import OffsetRMSNorm
from models.layers.rotary import apply_rotary, rotary_cos_sin
from pallas_kernels import NO_POSITION
from pallas_kernels.ragged_requests import request_of_token
from pallas_kernels.stored_dtype import as_values


class BlockIndexer(nnx.Module):
    """All heads share one key per block.

    Source: huggingface.co/docs/transformers/model_doc/qwen4_exp.
    """

    def __init__(self, config: BlockIndexedConfig, *, dtype: jnp.dtype) -> None:
        """Makes the index with weights to be filled in."""
        index = config.index
        width = (index.num_heads + 1) * index.head_dim
        self.index_qk_proj = Linear(config.hidden_size, width, dtype=dtype)
        self.q_layernorm = OffsetRMSNorm(index.head_dim, eps=index.eps, dtype=dtype)
        self.k_layernorm = OffsetRMSNorm(index.head_dim, eps=index.eps, dtype=dtype)
        self.config = config

    def project(
        self,
        normed: jax.Array,  # f[num_rows, hidden]
        cos: jax.Array,  # f32[num_rows, rotary_dim // 2]
        sin: jax.Array,  # f32[num_rows, rotary_dim // 2]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Queries f[num_rows, num_heads, head_dim], and the tokens' keys f[num_rows, head_dim]."""
        heads = split_heads(self.index_qk_proj(normed, context), self.config.index.head_dim)
        q, keys = heads[:, :-1], heads[:, -1]
        return apply_rotary(self.q_layernorm(q), cos, sin), keys

    def write(
        self,
        keys: jax.Array,  # f[num_tokens, head_dim], of the step's tokens
        pages: Pages,
        context: LayerContext,
    ) -> Pages:
        """Writes the tokens' keys, and the keys of the blocks that these tokens complete."""
        pages = write_vectors(keys, pages, context, cache_name=INDEX_KEYS)
        block_len, positions = self.config.index.block_len, context.batch.positions
        tokens = self._last_tokens(context)
        # Entries without a token read the last token, but nothing is written for them.
        own = jnp.minimum(tokens, positions.shape[0] - 1)
        earlier = self._earlier_keys(own, pages, context)
        of_block = jnp.concatenate([earlier, keys[own][:, None]], axis=1).astype(jnp.float32)
        normed = self.k_layernorm(of_block.mean(axis=1).astype(keys.dtype))
        starts = jnp.maximum(positions[own] - (block_len - 1), 0)
        turned = apply_rotary(normed[:, None], *rotary_cos_sin(starts, *self.config.rotary))[:, 0]
        return write_vectors(turned, pages, context, cache_name=INDEX_KEYS, tokens=tokens)

    def choose(
        self,
        q: jax.Array,  # f[num_queries, num_heads, head_dim]
        positions: jax.Array,  # i32[num_queries], of the tokens that attend
        pages: Pages,
        context: LayerContext,
    ) -> jax.Array:  # i32[num_queries, num_chosen * block_len + block_len - 1]
        """The positions that each token attends to, as `sparse_paged_attention` takes them.

        Every device of a mesh computes the same choice.
        """
        index, kernels, cache = self.config.index, context.kernels, context.cache(INDEX_KEYS)
        block_len = index.block_len

        def choose(q: jax.Array, pages: Pages, *sequences: jax.Array) -> jax.Array:
            return pallas_kernels.index_top_k(
                *(q, jnp.full(q.shape[:2], index.head_dim**-0.5, jnp.float32)),
                *(cache.format.view(pages, cache.block_size), cache.row, *sequences),
                top_k=index.num_chosen,
                key_step=block_len,
                kv_dtype=cache.format.kv_dtype(pages),
                batch_invariant=kernels.batch_invariant,
                implementation=kernels.implementation,
                target=kernels.target,
            )

        last = kernels.by_device(
            *(choose, q, pages, cache.block_tables, cache.seq_lens, context.query_start_loc),
            in_specs=(WHOLE, PAGES_BY_DEVICE, *[WHOLE] * 3),
            out_specs=WHOLE,
        )[:, :, None]
        back = jnp.arange(block_len - 1, -1, -1, dtype=jnp.int32)
        of_blocks = jnp.where(last == NO_POSITION, NO_POSITION, last - back)
        # Position 9 with blocks of 4: positions 8 and 9 are in no whole block.
        first = (positions[:, None] + 1) // block_len * block_len
        rest = first + jnp.arange(block_len - 1, dtype=jnp.int32)
        rest = jnp.where(rest <= positions[:, None], rest, NO_POSITION)
        return jnp.concatenate([rest, of_blocks.reshape(positions.shape[0], -1)], axis=1)

    def _last_tokens(self, context: LayerContext) -> jax.Array:  # i32[n]
        """The step's tokens that complete a block, then `num_tokens` in all other entries."""
        batch, block_len = context.batch, self.config.index.block_len
        num_tokens = batch.token_ids.shape[0]
        is_last = batch.positions % block_len == block_len - 1
        # A request that completes i blocks has more than (i - 1) * block_len tokens in the step.
        size = min(num_tokens, num_tokens // block_len + batch.num_reqs)
        return jnp.nonzero(is_last, size=size, fill_value=num_tokens)[0].astype(jnp.int32)

    def _earlier_keys(
        self,
        tokens: jax.Array,  # i32[n], in [0, num_tokens)
        pages: Pages,
        context: LayerContext,
    ) -> jax.Array:  # f[n, block_len - 1, head_dim]
        """The keys of the tokens just before some of the step's tokens, oldest first."""
        cache, batch = context.cache(INDEX_KEYS), context.batch
        req_idx = request_of_token(batch.query_start_loc, batch.token_ids.shape[0])[tokens]
        back = jnp.arange(self.config.index.block_len - 1, 0, -1, dtype=jnp.int32)
        positions = jnp.maximum(batch.positions[tokens][:, None] - back, 0)
        blocks = jnp.take_along_axis(
            cache.block_tables[req_idx], positions // cache.block_size, axis=1
        )

        def read(pages: Pages, blocks: jax.Array, offsets: jax.Array) -> jax.Array:
            view = cache.format.view(pages, cache.block_size)
            # Removes the axis of size 1, as `index_top_k` does.
            place = view.reshape(*view.shape[:2], *view.shape[3:]).at[cache.row, blocks, offsets]
            found = place.get(mode="promise_in_bounds", wrap_negative_indices=False)
            return as_values(found, cache.format.kv_dtype(pages))

        found = context.kernels.by_device(
            *(read, pages, blocks, positions % cache.block_size),
            in_specs=(PAGES_BY_DEVICE, WHOLE, WHOLE),
            out_specs=WHOLE,
        )
        return found[..., : self.config.index.head_dim]
