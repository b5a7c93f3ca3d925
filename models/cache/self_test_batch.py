"""The batch of the self-tests, and one layer that writes, attends and copies blocks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

# (query tokens, tokens in the cache): two decodes, a prompt, an empty row, and a chunk. With
# sequences of more than 512 tokens, the GPU's kernels for decodes split their work.
REQUESTS = ((1, 1), (1, 700), (40, 40), (0, 0), (70, 600))
NUM_PADDING_TOKENS = 3


class RaggedBatch(NamedTuple):
    """A batch over a pool in which every block is of one request, except the null block."""

    positions: jax.Array  # i32[num_tokens]
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_blocks(self) -> int:
        return 1 + self.block_tables.size


def ragged_batch(rng: np.random.Generator, block_size: int) -> RaggedBatch:
    """The batch of `REQUESTS`, and padding."""
    num_query = np.array([num_query for num_query, _ in REQUESTS])
    seq_lens = np.array([seq_len for _, seq_len in REQUESTS], np.int32)
    max_blocks_per_req = -(-int(seq_lens.max()) // block_size)
    tables = 1 + rng.permutation(len(REQUESTS) * max_blocks_per_req).astype(np.int32)
    num_tokens = int(num_query.sum()) + NUM_PADDING_TOKENS
    batch = RaggedBatch(
        positions=_positions(num_query, seq_lens, num_tokens),
        block_tables=tables.reshape(len(REQUESTS), -1),
        seq_lens=seq_lens,
        query_start_loc=np.concatenate([[0], np.cumsum(num_query)]).astype(np.int32),
    )
    return jax.device_put(batch)


def run_layer(
    attend: Callable[[jax.Array, tuple[jax.Array, ...]], jax.Array],
    kv_cache: jax.Array,  # [1, num_parts * num_blocks, num_kv_heads, block_size, head_dim]
    new: tuple[jax.Array, jax.Array | None],
    batch: RaggedBatch,
    chosen: dict[str, object],
) -> tuple[jax.Array, jax.Array]:
    """Writes the batch's tokens, attends, and copies blocks.

    Args:
        attend: Takes the cache, and the block tables, lengths and starts of the requests.
        new: What `kv_scatter` writes: keys and values, or vectors and None.
        chosen: Arguments of every op.

    Returns:
        Attention's output, and the cache at the end.
    """
    block_size = kv_cache.shape[3]
    sequences = (batch.block_tables, batch.seq_lens, batch.query_start_loc)
    slots = pallas_kernels.slot_mapping(
        *(batch.positions[None], sequences[0][None], sequences[2]),
        block_size=block_size,
        pad_slot=pallas_kernels.pad_slot(1, batch.num_blocks, block_size),
        **chosen,
    )[0]
    kv_cache = pallas_kernels.kv_scatter(kv_cache, *new, slots, 0, **chosen)
    out = attend(kv_cache, sequences)
    # Two copies, of which one reads what the other writes, and padding.
    sources, targets = jnp.array([1, 2, 0]), jnp.array([2, 3, batch.num_blocks])
    pages = kv_cache.reshape(1, batch.num_blocks, -1)
    pages = pallas_kernels.block_copy(pages, sources, targets, **chosen)
    return out, pages.reshape(kv_cache.shape)


def _positions(
    num_query: Sequence[int], seq_lens: Sequence[int], num_tokens: int
) -> np.ndarray:  # i32[num_tokens]
    positions = np.zeros(num_tokens, np.int32)
    own = [np.arange(n - q, n) for q, n in zip(num_query, seq_lens, strict=True)]
    positions[: sum(num_query)] = np.concatenate(own)
    return positions
