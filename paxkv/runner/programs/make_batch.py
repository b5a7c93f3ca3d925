"""Functions that make a `ForwardBatch`. No other module of the runner makes one."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models import ForwardBatch, GroupInputs, StateInputs, Wants
from paxkv.runner.shapes.packed_layout import table_field
from paxkv.runner.shapes.program_shapes import BurstShape, StepShape, TableShape

# The blocks of slots that the device keeps, i32[`SlotShape.dims`] for each table of states.
SlotBlocks = tuple[jax.Array, ...]


def tables_of(
    fields: Mapping[str, jax.Array],
    shape: StepShape | BurstShape,
    slot_blocks: SlotBlocks | None = (),
) -> tuple[jax.Array, ...]:  # i32[`TableShape.dims`] each
    """Returns the block tables of a step, one array for each of `shape.tables`.

    Args:
        slot_blocks: The blocks of slots, for each table of states. None: the program reads no
            states, so their tables have only null blocks.
    """
    blocks = None if slot_blocks is None else iter(slot_blocks)
    tables = []
    for inputs_idx, table in enumerate(shape.tables):
        field = fields[table_field(inputs_idx)]
        if table.is_state and blocks is None:
            field = jnp.zeros(table.dims(shape.num_reqs), jnp.int32)
        elif table.is_state:
            # i32[2, num_reqs, num_groups, blocks_per_state]
            field = next(blocks)[field].swapaxes(1, 2)
        tables.append(field)
    return tuple(tables)


def write_slots(
    slot_blocks: jax.Array,  # i32[num_slots, num_groups, blocks_per_state]
    packed: jax.Array,  # i32[`SlotShape.packed_dims`]
) -> jax.Array:
    """Replaces the blocks of some slots, under `jit`. Ignores slots past the last one."""
    blocks = packed[:, 1:].reshape(-1, *slot_blocks.shape[1:])
    return slot_blocks.at[packed[:, 0]].set(blocks, mode="drop")


class StateRows(NamedTuple):
    """The rows of `StateInputs`.

    Each request has two slots. By default, a step reads the first and writes the second.
    """

    num_computed: jax.Array  # i32[num_reqs], tokens of the request before this step
    query_start_loc: jax.Array  # i32[num_reqs + 1]
    is_alive: jax.Array  # bool[num_reqs]
    has_one_token_each: bool
    reads_second: jax.Array | bool = False  # bool[num_reqs]
    writes_first: jax.Array | bool = False  # bool[num_reqs]
    state_ends: jax.Array | None = None  # i32[num_reqs], see `StateInputs`

    def inputs(
        self,
        slots: jax.Array,  # i32[2, num_groups, num_reqs, blocks_per_state]
    ) -> StateInputs:
        def choose(is_second: jax.Array | bool) -> jax.Array:
            return jnp.where(jnp.reshape(is_second, (1, -1, 1)), slots[1], slots[0])

        starts_from_zero = self.num_computed == 0
        # Rows that need no state read the null block.
        is_read = (self.is_alive & ~starts_from_zero)[None, :, None]
        return StateInputs(
            read_slots=jnp.where(is_read, choose(self.reads_second), 0),
            write_slots=choose(jnp.logical_not(self.writes_first)),
            starts_from_zero=starts_from_zero,
            is_alive=self.is_alive,
            query_start_loc=self.query_start_loc,
            has_one_token_each=self.has_one_token_each,
            state_ends=self.state_ends,
        )


def make_batch(
    *,
    token_ids: jax.Array,  # i32[num_tokens]
    positions: jax.Array,  # i32[num_tokens]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    seq_lens: jax.Array,  # i32[num_reqs]
    block_tables: Sequence[jax.Array],  # i32[`TableShape.dims`] each
    table_shapes: Sequence[TableShape],
    logits_indices: jax.Array,  # i32[num_logits]
    wants: Wants,
    max_query_len: int | None = None,
    widths: tuple[int, ...] = (),
    state_rows: StateRows | None = None,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
) -> ForwardBatch:
    """Makes a batch of requests with any number of tokens. See `ForwardBatch` for the arguments.

    Args:
        state_rows: The rows of states. None: the rows of the batch, which are all alive.
        state_ends: See `StateInputs`; only without `state_rows`.
    """
    state_rows = state_rows or StateRows(
        num_computed=seq_lens - (query_start_loc[1:] - query_start_loc[:-1]),
        query_start_loc=query_start_loc,
        is_alive=jnp.ones(seq_lens.shape, bool),
        has_one_token_each=False,
        state_ends=state_ends,
    )
    groups = tuple(
        state_rows.inputs(tables)
        if shape.is_state
        else GroupInputs(block_tables=tables, seq_lens=seq_lens, block_size=shape.block_size)
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
    block_tables: Sequence[jax.Array],  # i32[`TableShape.dims`] each
    table_shapes: Sequence[TableShape],
    widths: tuple[int, ...] = (),
    is_alive: jax.Array | None = None,  # bool[num_reqs]; None: all rows with a request
    slot_switches: jax.Array | None = None,  # i32[num_reqs]
    state_rows: StateRows | None = None,
) -> ForwardBatch:
    """Makes a batch of one token per request. The model returns the logits of all requests.

    Args:
        is_alive: See `StateInputs`.
        slot_switches: Position of the first token whose state is written to the row's second slot.
            None: all states are.
        state_rows: The rows of states. None: the rows of the batch.
    """
    row_idx = jnp.arange(token_ids.shape[0] + 1, dtype=jnp.int32)
    query_start_loc = jnp.minimum(row_idx, num_used)
    state_rows = state_rows or StateRows(
        num_computed=positions,
        query_start_loc=query_start_loc,
        is_alive=jnp.ones(positions.shape, bool) if is_alive is None else is_alive,
        has_one_token_each=True,
        reads_second=False if slot_switches is None else positions > slot_switches,
        writes_first=False if slot_switches is None else positions < slot_switches,
    )
    return make_batch(
        token_ids=token_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=jnp.where(row_idx[:-1] < num_used, positions + 1, 0),
        block_tables=block_tables,
        table_shapes=table_shapes,
        logits_indices=row_idx[:-1],
        wants=Wants(logits="last"),
        max_query_len=1,
        widths=widths,
        state_rows=state_rows,
    )


def spread_places(
    counts: jax.Array,  # i32[num_rows]
    num_places: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gives each row `counts` consecutive places.

    Returns:
        The first place of each row and the end, i32[num_rows + 1]; for each place, its row; and its
        index among the places of the row. Places after the end have any row, and index -1.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = jnp.pad(ends, (1, 0))
    places = jnp.arange(num_places, dtype=jnp.int32)
    row = jnp.searchsorted(ends, places, side="right").astype(jnp.int32)
    row = jnp.minimum(row, counts.shape[0] - 1)
    return starts, row, jnp.where(places < ends[-1], places - starts[row], -1)
