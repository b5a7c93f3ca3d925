"""The compiled burst: decode steps of the same requests in one loop on the device."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Pages, Width, run_at_width
from paxkv.runner.features.traced_features import FeatureValues, TracedFeatures
from paxkv.runner.programs.decode_loop import (
    DecodeRows,
    DecodeState,
    first_decode_state,
    run_decode_loop,
)
from paxkv.runner.programs.make_batch import SlotBlocks, tables_of
from paxkv.runner.programs.step import Params, select_tokens
from paxkv.runner.sampling.draw_rows import draw_rows
from paxkv.runner.sampling.row_state import RowState
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH
from paxkv.runner.sampling.sampler import argmax_grouped
from paxkv.runner.sampling.sampling_columns import join_step_rows
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import BurstShape

# (params, kv_cache, packed, prev_tokens, logits, row_state, kept, donated,
# slot_blocks) ->
# (kv_cache, logits, row_state, sampling, result, next_tokens, donated)
BurstFunction = Callable[
    [
        Params,
        Pages,
        jax.Array,
        jax.Array,
        jax.Array,
        RowState,
        FeatureValues,
        FeatureValues,
        SlotBlocks,
    ],
    tuple[Pages, jax.Array, RowState, jax.Array, jax.Array, jax.Array, FeatureValues],
]
# What draws pass from one step to the next: logits f32[max_num_seqs, vocab], and the rows' state.
_Drawing = tuple[jax.Array, RowState]


def make_burst(model: LoadedModel, shape: BurstShape) -> BurstFunction:
    """The burst of one shape, not yet compiled.

    It runs up to `num_steps` steps. A row takes part in the first `num_tokens` of them, or until it
    draws a token that ends its request. The burst ends when no row is left.
    Its result i32[max_steps, num_reqs, RESULT_WIDTH] has `NO_TOKEN` where a row drew nothing.
    `next_tokens` i32[max_num_seqs] are the last tokens drawn. Last come the donated arrays of the
    shape's features.

    With `leaves_logits`, the burst takes one step and draws nothing. It leaves the step's logits
    and `sampling` i32[max_num_seqs, step_row_width] for the sampler, as `make_step` does.
    """
    layout = PackedLayout(shape)

    def burst(
        params: Params,
        kv_cache: Pages,
        packed: jax.Array,  # i32[num_words]
        prev_tokens: jax.Array,  # i32[max_num_seqs]
        logits: jax.Array,  # f32[max_num_seqs, vocab], of an earlier step, to be overwritten
        row_state: RowState,
        kept: FeatureValues = (),
        donated: FeatureValues = (),
        slot_blocks: SlotBlocks = (),
    ) -> tuple[Pages, jax.Array, RowState, jax.Array, jax.Array, jax.Array, FeatureValues]:
        fields = layout.unpack(packed)
        num_reqs = shape.num_reqs
        features = TracedFeatures(shape.features, kept, num_tokens=num_reqs, num_reqs=num_reqs)
        has_request = fields["num_tokens"] > 0
        rows = DecodeRows(
            num_tokens=fields["num_tokens"],
            ending_ids=fields["ending_ids"],
            first_end=fields["first_end"],
            num_used=has_request.sum(dtype=jnp.int32),
            block_tables=tables_of(fields, shape, slot_blocks),
            slot_switches=fields.get("slot_switch"),
            table_shapes=shape.tables,
            widths=shape.widths,
        )
        token_ids = select_tokens(fields, prev_tokens)
        state = first_decode_state(
            token_ids=token_ids,
            positions=fields["positions"],
            is_alive=has_request,
            pages=kv_cache,
            drawing=(logits, row_state),
            max_steps=shape.max_steps,
            result_width=RESULT_WIDTH,
            feature_values=features.first_values(donated),
        )
        max_num_seqs = prev_tokens.shape[0]
        sampling = _sampling_of(fields, state, num_rows=max_num_seqs)
        draw = functools.partial(_draw, model, shape, fields)
        num_steps = fields["num_steps"][0]
        state = run_decode_loop(
            *(model, params, rows, state, draw),
            num_steps=num_steps,
            features=features,
            fields=fields | {"token_ids": token_ids},
        )
        logits, row_state = state.drawing
        next_tokens = jnp.pad(state.drawn_ids, (0, max_num_seqs - num_reqs))
        _, donated = features.split(state.feature_values)
        return state.pages, logits, row_state, sampling, state.results, next_tokens, donated

    return burst


def _sampling_of(
    fields: dict[str, jax.Array], state: DecodeState, *, num_rows: int
) -> jax.Array:  # i32[num_rows, step_row_width]
    """The columns that draw the next token. Rows that draw nothing have `draw_position` 0."""
    draws = state.is_alive & (fields["draws"] != 0)
    # The position of the drawn token, so that draws do not depend on how steps divide a request.
    draw_position = jnp.where(draws, state.positions + 1, 0)
    rows = {"sampling_rows": fields["sampling_rows"], "draw_position": draw_position}
    return join_step_rows(rows, num_rows=num_rows)


def _draw(
    model: LoadedModel,
    shape: BurstShape,
    fields: dict[str, jax.Array],
    params: Params,
    batch: ForwardBatch,
    hidden: jax.Array,  # f[num_reqs, hidden]
    state: DecodeState,
) -> tuple[jax.Array, _Drawing]:  # i32[num_reqs, RESULT_WIDTH]
    logits, row_state = state.drawing
    logits, greedy_ids = find_logits(model, params, batch, hidden, logits)
    sampling = _sampling_of(fields, state, num_rows=shape.num_reqs)
    # With `draw_position` 0, no row draws, and none is processed.
    sampling = jnp.where(fields["leaves_logits"][0] != 0, 0, sampling)
    result, row_state = draw_rows(
        logits,
        row_state,
        sampling,
        None,
        chunk_rows=shape.chunk_rows,
        mesh=model.kernels.mesh,
        greedy_ids=greedy_ids,
    )
    return result, (logits, row_state)


def find_logits(
    model: LoadedModel,
    params: Params,
    batch: ForwardBatch,
    hidden: jax.Array,  # f[num_draws, hidden]; there are no more draws than tokens
    room: jax.Array,  # f32[num_rows, vocab]
) -> tuple[jax.Array, jax.Array]:  # f32[num_rows, vocab], i32[num_draws]
    """Logits and most likely tokens of the rows of the step's width; later rows are undefined."""

    def find(width: Width, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = model.compute_logits(params, width.read(hidden))
        parts = (logits, argmax_grouped(logits, model.kernels.mesh))
        return tuple(map(width.write, carry, parts))

    num_draws = hidden.shape[0]
    widths = tuple(sorted({min(width, num_draws) for width in batch.widths or (num_draws,)}))
    num_used = jnp.minimum(batch.query_start_loc[-1], num_draws)
    return run_at_width(widths, num_used, find, (room, jnp.zeros(num_draws, jnp.int32)))
