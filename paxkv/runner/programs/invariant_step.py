"""The compiled step whose numbers do not depend on the batch, for `--batch-invariant`."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Pages
from paxkv.runner.features.traced_features import FeatureValues, TracedFeatures
from paxkv.runner.programs.make_batch import (
    SlotBlocks,
    StateRows,
    make_decode_batch,
    tables_of,
)
from paxkv.runner.programs.step import Params, StepFunction, unpack_fields
from paxkv.runner.sampling.sampling_columns import join_step_rows
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import StepShape
from paxkv.runner.shapes.step_variant import StepPart

# The first token i32[] of the next tile, the cache, logits f32[num_rows, vocab], and what parts of
# the step change for features.
_TileState = tuple[jax.Array, Pages, jax.Array, FeatureValues]


def make_invariant_step(model: LoadedModel, shape: StepShape) -> StepFunction:
    """The step of one shape with `tile_tokens`, not yet compiled; called like `make_step`'s.

    The step computes its tokens tile by tile, in order. In a tile, each token is a request of its
    own with one token. Therefore, products and sums have the same shape in every step, and the
    numbers of a token depend only on the keys and values before it. A tile writes the keys and
    values of all its tokens before any of them attends. States have a row for each request, because
    a token needs the state after the token before it.

    No state after a draft is kept, so a tile ends before the drafts of a request if it has no room
    for all of them.
    """
    layout = PackedLayout(shape)
    tile_tokens = shape.tile_tokens
    assert tile_tokens is not None, "a batch-invariant step has tiles"

    def step(
        params: Params,
        kv_cache: Pages,
        packed: jax.Array,  # i32[num_words]
        prev_tokens: jax.Array,  # i32[max_num_seqs]
        logits: jax.Array,  # f32[num_rows, vocab], of an earlier step, to be overwritten
        kept: FeatureValues = (),
        donated: FeatureValues = (),
        slot_blocks: SlotBlocks = (),
    ) -> tuple[Pages, jax.Array, jax.Array, FeatureValues, FeatureValues]:
        fields = unpack_fields(layout, packed, prev_tokens)
        features = TracedFeatures(
            shape.features, kept, num_tokens=shape.num_tokens, num_reqs=shape.num_reqs
        )
        tables = tables_of(fields, shape, slot_blocks)
        logits_row = _logits_rows(fields, num_logits=logits.shape[0])

        def run_tile(state: _TileState) -> _TileState:
            start, kv_cache, logits, values = state
            end = _end_of_tile(fields, start, shape)
            batch = features.add_wants(_batch_of_tile(fields, tables, start, end, shape))
            part = StepPart(start=start, batch=batch, fields=fields)
            apply = functools.partial(features.apply, part=part, values=values)
            outputs, kv_cache = model.forward(params, kv_cache, batch, apply)
            tile_rows = jax.lax.dynamic_slice_in_dim(logits_row, start, tile_tokens)
            tile_logits = model.compute_logits(params, outputs.for_logits)

            def logits_of(hidden: jax.Array) -> jax.Array:
                # The tile has computed the logits of all its tokens already.
                if hidden is outputs.for_logits:
                    return tile_logits
                return model.compute_logits(params, hidden)

            values = features.update(values, outputs, part, logits_of)
            # A later tile writes rows of tokens from `end` on again.
            return end, kv_cache, logits.at[tile_rows].set(tile_logits, mode="drop"), values

        num_tokens = fields["query_start_loc"][-1]
        _, kv_cache, logits, values = jax.lax.while_loop(
            lambda state: state[0] < num_tokens,
            run_tile,
            (jnp.int32(0), kv_cache, logits, features.first_values(donated)),
        )
        sampling = join_step_rows(fields, num_rows=logits.shape[0])
        return kv_cache, logits, sampling, *features.split(values)

    return step


def _logits_rows(fields: dict[str, jax.Array], *, num_logits: int) -> jax.Array:  # i32[num_tokens]
    """The row for each token's logits; `num_logits`, past the last row, if none needs them."""
    num_tokens, num_wanted = fields["token_ids"].shape[0], fields["logits_indices"].shape[0]
    # Logits from which no token is drawn are not needed.
    token_idx = jnp.where(fields["draw_position"] > 0, fields["logits_indices"], num_tokens)
    rows = jnp.full(num_tokens, num_logits, jnp.int32)
    return rows.at[token_idx].set(jnp.arange(num_wanted, dtype=jnp.int32), mode="drop")


def _end_of_tile(
    fields: dict[str, jax.Array],
    start: jax.Array,  # i32[], the tile's first token
    shape: StepShape,
) -> jax.Array:  # i32[], one past its last token
    starts = fields["query_start_loc"]
    end = jnp.minimum(start + shape.tile_tokens, starts[-1])
    if "state_ends" not in fields:
        return end
    # Empty rows have 0 in `state_ends`, and start after the last token.
    first_drafts = jnp.maximum(fields["state_ends"], starts[:-1])
    are_split = (first_drafts < end) & (end < starts[1:])
    return jnp.min(jnp.where(are_split, first_drafts, end))


def _batch_of_tile(
    fields: dict[str, jax.Array],
    tables: Sequence[jax.Array],  # of `tables_of`
    start: jax.Array,  # i32[], the tile's first token
    end: jax.Array,  # i32[], one past its last token
    shape: StepShape,
) -> ForwardBatch:
    starts = fields["query_start_loc"]
    token_idx = start + jnp.arange(shape.tile_tokens, dtype=jnp.int32)
    req_idx = jnp.searchsorted(starts, token_idx, side="right").astype(jnp.int32) - 1
    req_idx = jnp.clip(req_idx, 0, shape.num_reqs - 1)

    def of_tile(name: str) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(fields[name], start, shape.tile_tokens)

    return make_decode_batch(
        token_ids=of_tile("token_ids"),
        positions=of_tile("positions"),
        num_used=end - start,
        block_tables=[
            table if table_shape.is_state else table[:, req_idx]
            for table, table_shape in zip(tables, shape.tables, strict=True)
        ],
        table_shapes=shape.tables,
        state_rows=_state_rows_of_tile(fields, start, end, shape),
    )


def _state_rows_of_tile(
    fields: dict[str, jax.Array],
    start: jax.Array,  # i32[], the tile's first token
    end: jax.Array,  # i32[], one past its last token
    shape: StepShape,
) -> StateRows:
    """A row for each request of the step, with its tokens in the tile."""
    starts = fields["query_start_loc"]
    num_before_step = fields["seq_lens"] - (starts[1:] - starts[:-1])
    num_before_tile = jnp.maximum(start - starts[:-1], 0)

    def in_tile(token_idx: jax.Array) -> jax.Array:
        return jnp.clip(token_idx - start, 0, end - start)

    return StateRows(
        num_computed=num_before_step + num_before_tile,
        query_start_loc=in_tile(starts),
        is_alive=jnp.ones(shape.num_reqs, bool),
        has_one_token_each=False,
        # An earlier tile has written the state to the second slot.
        reads_second=num_before_tile > 0,
        state_ends=in_tile(fields["state_ends"]) if "state_ends" in fields else None,
    )
