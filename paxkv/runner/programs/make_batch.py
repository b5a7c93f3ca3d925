"""Functions that make a `ForwardBatch`. No other module of the runner makes one."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from models import ForwardBatch, GroupInputs, Wants
from paxkv.runner.shapes.packed_layout import table_field
from paxkv.runner.shapes.program_shapes import BurstShape, StepShape, TableShape


def tables_of(
    fields: Mapping[str, jax.Array], shape: StepShape | BurstShape
) -> tuple[jax.Array, ...]:  # i32[num_groups, num_reqs, max_blocks_per_req] each
    """Returns the block tables in a step's buffer, one array for each of `shape.tables`."""
    return tuple(fields[table_field(i)] for i in range(len(shape.tables)))


def make_batch(
    *,
    token_ids: jax.Array,  # i32[num_tokens]
    positions: jax.Array,  # i32[num_tokens]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    seq_lens: jax.Array,  # i32[num_reqs]
    block_tables: Sequence[jax.Array],  # i32[num_groups, num_reqs, max_blocks_per_req] each
    table_shapes: Sequence[TableShape],
    logits_indices: jax.Array,  # i32[num_logits]
    wants: Wants,
    max_query_len: int | None = None,
    widths: tuple[int, ...] = (),
) -> ForwardBatch:
    """Makes a batch of requests with any number of tokens. See `ForwardBatch` for the arguments."""
    groups = tuple(
        GroupInputs(block_tables=tables, seq_lens=seq_lens, block_size=shape.block_size)
        for tables, shape in zip(block_tables, table_shapes, strict=True)
    )
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        groups=groups,
        logits_indices=logits_indices,
        max_query_len=max_query_len,
        wants=wants,
        widths=widths,
    )


def make_decode_batch(
    *,
    token_ids: jax.Array,  # i32[num_reqs]
    positions: jax.Array,  # i32[num_reqs]
    num_used: jax.Array | int,  # i32[], number of rows with a request; these rows come first
    block_tables: Sequence[jax.Array],  # i32[num_groups, num_reqs, max_blocks_per_req] each
    table_shapes: Sequence[TableShape],
    widths: tuple[int, ...] = (),
) -> ForwardBatch:
    """Makes a batch of one token per request. The model returns the logits of all requests."""
    row_idx = jnp.arange(token_ids.shape[0] + 1, dtype=jnp.int32)
    return make_batch(
        token_ids=token_ids,
        positions=positions,
        query_start_loc=jnp.minimum(row_idx, num_used),
        seq_lens=jnp.where(row_idx[:-1] < num_used, positions + 1, 0),
        block_tables=block_tables,
        table_shapes=table_shapes,
        logits_indices=row_idx[:-1],
        wants=Wants(logits="last"),
        max_query_len=1,
        widths=widths,
    )
