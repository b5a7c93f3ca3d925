"""Fast plain-JAX body of `mla_decode`: a loop over one flat list of the blocks that exist."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.xla_problem import MASKED_LOGIT, RunningSoftmax, product_f32

# Tokens that one step of the loop reads; a guess, taken over from `paged_attention`.
_CHUNK_TOKENS = 1024


class _ListedBlocks(NamedTuple):
    """Some entries of the list: each a block of one request."""

    req_idx: jax.Array  # i32[chunk_blocks], num_reqs for entries past the end of the list
    readable_req: jax.Array  # i32[chunk_blocks], in [0, num_reqs)
    latents: jax.Array  # f[chunk_blocks, block_size, cache_dim]
    is_seen: jax.Array  # bool[chunk_blocks, block_size]


def mla_decode_xla(
    q: jax.Array,  # f[num_tokens, num_q_heads, latent_dim + rope_dim]
    kv_cache: jax.Array,  # f[num_rows, num_blocks, 1, block_size, latent_dim + rope_dim]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    latent_dim: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, latent_dim], f32[num_tokens, ...]
    """See `api.mla_decode`.

    The list exists only as a cumulative sum. Blocks of each request [2, 0, 3] -> ends [2, 2, 5] ->
    request of entries 0..5: [0, 0, 2, 2, 2, 3], where 3 = num_reqs is past the end.
    """
    num_tokens, num_q_heads, _ = q.shape
    num_blocks, _, block_size, cache_dim = kv_cache.shape[1:]
    num_reqs, max_blocks_per_req = block_tables.shape
    chunk_blocks = min(max(1, _CHUNK_TOKENS // block_size), num_reqs * max_blocks_per_req)
    # Merging the two leading axes is free. Indexing the row instead would slice it: a copy.
    all_blocks = kv_cache.reshape(-1, block_size, cache_dim)

    has_query = query_start_loc[1:] > query_start_loc[:-1]
    num_needed = jnp.where(has_query, (seq_lens + block_size - 1) // block_size, 0)
    entry_ends = jnp.cumsum(num_needed, dtype=jnp.int32)  # i32[num_reqs]

    def read_chunk(chunk_idx: jax.Array) -> _ListedBlocks:
        entry = chunk_idx * chunk_blocks + jnp.arange(chunk_blocks, dtype=jnp.int32)
        req_idx = jnp.searchsorted(entry_ends, entry, side="right", method="compare_all")
        readable_req = jnp.minimum(req_idx, num_reqs - 1)
        logical_block = entry - (entry_ends - num_needed)[readable_req]
        logical_block = jnp.clip(logical_block, 0, max_blocks_per_req - 1)
        block_id = row * num_blocks + block_tables[readable_req, logical_block]
        # The table past the end of a sequence holds anything: block 0 is read instead.
        block_id = jnp.where(req_idx < num_reqs, block_id, 0)
        position = logical_block[:, None] * block_size + jnp.arange(block_size)
        return _ListedBlocks(
            req_idx,
            readable_req,
            all_blocks.at[block_id].get(mode="promise_in_bounds"),
            position < seq_lens[readable_req][:, None],
        )

    q_of_req = q[jnp.clip(query_start_loc[:-1], 0, num_tokens - 1)]

    def add_chunk(chunk_idx: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
        return _add_blocks(softmax, q_of_req, read_chunk(chunk_idx), latent_dim, scale)

    num_chunks = (entry_ends[-1] + chunk_blocks - 1) // chunk_blocks
    empty = jnp.zeros((num_reqs, num_q_heads), jnp.float32)
    nothing_seen = RunningSoftmax(
        empty + MASKED_LOGIT, empty, jnp.zeros((*empty.shape, latent_dim), jnp.float32)
    )
    out, lse = lax.fori_loop(0, num_chunks, add_chunk, nothing_seen).result()
    token = jnp.where(has_query, query_start_loc[:-1], num_tokens)  # past the end: dropped
    all_out = jnp.zeros((num_tokens, num_q_heads, latent_dim), q.dtype)
    all_lse = jnp.full((num_tokens, num_q_heads), -jnp.inf)
    return (
        all_out.at[token].set(out.astype(q.dtype), mode="drop"),
        all_lse.at[token].set(lse, mode="drop"),
    )


def _add_blocks(
    softmax: RunningSoftmax,  # f32[num_reqs, num_q_heads]
    q: jax.Array,  # f[num_reqs, num_q_heads, cache_dim]
    blocks: _ListedBlocks,
    latent_dim: int,
    scale: float,
) -> RunningSoftmax:
    """Adds each block to the running softmax of its request."""
    req_idx, readable_req, latents, is_seen = blocks
    # Unwritten memory may hold NaN, and a weight of 0 times NaN is NaN.
    latents = jnp.where(is_seen[:, :, None], latents, 0)
    products = product_f32("nhd,npd->nhp", q[readable_req], latents)
    logits = jnp.where(is_seen[:, None, :], products * scale, MASKED_LOGIT)
    largest = softmax.largest.at[req_idx].max(logits.max(axis=-1), mode="drop")
    rescale = jnp.exp(softmax.largest - largest)
    # A block on the list has a position that is seen, so `largest` is a true logit and masked
    # weights underflow to 0.
    weights = jnp.exp(logits - largest[readable_req][..., None])
    values = latents[..., :latent_dim]
    # In the wider of q's dtype and the cache's, as in `paged_attention`.
    weights_dtype = jnp.promote_types(q.dtype, values.dtype)
    sums = product_f32("nhp,npd->nhd", weights.astype(weights_dtype), values)
    return RunningSoftmax(
        largest,
        (softmax.denominator * rescale).at[req_idx].add(weights.sum(axis=-1), mode="drop"),
        (softmax.weighted_values * rescale[..., None]).at[req_idx].add(sums, mode="drop"),
    )
