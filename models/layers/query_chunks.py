"""Attention to the cache in chunks of query rows, so that large arrays exist for few rows only."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.forward.layer_context import LayerContext
from models.forward.row_widths import Chunk

# Most numbers of one array of absorbed queries on one device: 64 MiB of bfloat16.
MAX_NUMBERS = 2**25

# Takes the arrays of a chunk's rows, `seq_lens` i32[num_reqs] and `query_start_loc`
# i32[num_reqs + 1] that count only the chunk's tokens, and the context of its rows.
AttendChunk = Callable[[tuple[jax.Array, ...], jax.Array, jax.Array, LayerContext], jax.Array]


def chunk_rows(num_rows: int, numbers_per_row: int) -> int | None:
    """Rows of a chunk, so that its largest array has at most `MAX_NUMBERS` numbers.

    Returns:
        None if all rows fit. Chunks have equal sizes if the largest power of two that fits divides
        the number of rows.
    """
    if num_rows * numbers_per_row <= MAX_NUMBERS:
        return None
    fitting = max(MAX_NUMBERS // numbers_per_row, 1)
    num_chunks = -(-num_rows // 2 ** (fitting.bit_length() - 1))
    return -(-num_rows // num_chunks)


def map_query_chunks(
    attend: AttendChunk,
    arrays: tuple[jax.Array, ...],  # [num_queries, ...]
    out: jax.Array,  # f[num_queries, ...], the result of rows of padding
    seq_lens: jax.Array,  # i32[num_reqs]
    context: LayerContext,
    *,
    size: int,
) -> jax.Array:  # f[num_queries, ...]
    """Computes the rows of `out` chunk by chunk. Chunks of padding alone are skipped.

    A chunk starts and ends anywhere in a request. Its tokens attend to the request's cache up to
    the chunk's last token, so the step's tokens must have been written.

    Args:
        context: Of the rows that attend (`LayerContext.of_kept`).
        size: Rows of a chunk.
    """
    num_rows = out.shape[0]
    starts = context.query_start_loc
    missing = -num_rows % size
    arrays, out = jax.tree.map(
        lambda x: jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))), (arrays, out)
    )

    def attend_chunk(chunk_idx: jax.Array, out: jax.Array) -> jax.Array:
        chunk = Chunk(start=chunk_idx * size, size=size)
        first, end = chunk.start, chunk.start + size
        own_starts = jnp.clip(starts, first, end) - first
        num_later = jnp.maximum(starts[1:] - jnp.maximum(starts[:-1], end), 0)
        own = attend(
            jax.tree.map(chunk.read, arrays), seq_lens - num_later, own_starts, context.of(chunk)
        )
        return chunk.write(out, own)

    num_chunks = (starts[-1] + size - 1) // size
    return jax.lax.fori_loop(0, num_chunks, attend_chunk, out)[:num_rows]
