"""A decode loop that verifies drafts: draft, verify, accept, and draft again on the device.

Each token is drawn with the randomness of its position, as in a loop without drafts, so the tokens
are the same. See `sampling/accept_drafts.py`.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Pages, Wants
from paxkv.runner.features.traced_features import NO_FEATURES, FeatureValues, TracedFeatures
from paxkv.runner.programs.decode_loop import DecodeRows
from paxkv.runner.programs.loop_drafters.base import DraftedRows, LoopDrafter, VerifiedStep
from paxkv.runner.programs.make_batch import make_batch
from paxkv.runner.programs.step import Params
from paxkv.runner.sampling.accept_drafts import accept_drafts
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampling_columns import join_step_rows
from paxkv.runner.shapes.program_shapes import SamplerShape
from paxkv.runner.shapes.sampling_row import DRAW_REQ
from paxkv.runner.shapes.step_variant import StepPart


class DraftingState(NamedTuple):
    """The state between two steps.

    A row that has ended computes the first token of its last step again, so it writes the keys and
    values that are there already.
    """

    token_ids: jax.Array  # i32[num_rows, max_tokens], of prompt and output
    positions: jax.Array  # i32[num_rows], of the token that the row computes first in the next step
    num_drawn: jax.Array  # i32[num_rows]
    is_alive: jax.Array  # bool[num_rows]
    pages: Pages
    drawing: Any  # the state of `DrawDraftsFunction`, a pytree
    # The draws of each row, without gaps. The last column is 1 + the number of drafts for a draw
    # before drafts, and 0 for a draw that follows an accepted draft. `NO_TOKEN` where a row drew
    # nothing.
    results: jax.Array  # i32[max_drawn, num_rows, result_width + 1]
    num_steps: jax.Array  # i32[]
    memory: Any  # of the `LoopDrafter`, a pytree
    feature_values: FeatureValues = ()  # of `TracedFeatures`, from step to step


# (params, batch, hidden, sampling, drawing) -> (result i32[num_tokens, result_width], drawing).
# Draws a token for each row of `sampling` i32[num_tokens, step_row_width] that has a
# `draw_position`. A result starts with the token.
DrawDraftsFunction = Callable[
    [Params, ForwardBatch, jax.Array, jax.Array, Any],
    tuple[jax.Array, Any],
]


def run_drafting_loop(
    model: LoadedModel,
    params: Params,
    rows: DecodeRows,
    state: DraftingState,
    sampling_rows: jax.Array,  # i32[num_rows, NUM_COLUMNS]
    drafter: LoopDrafter,
    draw: DrawDraftsFunction,
    *,
    features: TracedFeatures = NO_FEATURES,
    fields: Mapping[str, jax.Array] = MappingProxyType({}),
) -> DraftingState:
    """Runs steps until each row has ended or drawn `rows.num_tokens` tokens.

    Each step draws 1 to `1 + num_drafts` tokens of a row. It verifies no draft after the last token
    that the row may draw, so the row writes only the positions that it would write without drafts.

    Args:
        rows: `widths` are numbers of tokens that a step can compute.
        fields: See `StepPart`.
    """

    def run_step(state: DraftingState) -> DraftingState:
        num_left = jnp.where(state.is_alive, rows.num_tokens - state.num_drawn - 1, 0)
        drafted = DraftedRows(
            rows=rows,
            token_ids=state.token_ids,
            positions=state.positions,
            num_useful=jnp.minimum(num_left, drafter.num_drafts),
        )
        drafts, pages = drafter.propose(drafted, state.pages, state.memory)
        num_found = (drafts != NO_TOKEN).sum(axis=1, dtype=jnp.int32)
        num_drafts = jnp.minimum(num_found, drafted.num_useful)
        batch, sampling = _verifying_batch(rows, state, sampling_rows, drafts, num_drafts)
        batch = features.add_wants(batch)
        part = StepPart(start=jnp.int32(0), batch=batch, fields=fields)
        apply = functools.partial(features.apply, part=part, values=state.feature_values)
        outputs, pages = model.forward(params, pages, batch, apply)
        logits_of = functools.partial(model.compute_logits, params)
        feature_values = features.update(state.feature_values, outputs, part, logits_of)
        drawn, drawing = draw(params, batch, outputs.for_logits, sampling, state.drawing)
        after = _append_drawn(rows, state, drawn, sampling, num_drafts, drafter.num_drafts)
        step = VerifiedStep(
            batch=batch,
            row_of_token=sampling[:, DRAW_REQ],
            outputs=outputs,
            token_ids=after.token_ids,
            num_kept=after.num_drawn - state.num_drawn,
            is_alive=after.is_alive,
        )
        pages, memory = drafter.read_step(rows, step, pages, state.memory)
        return after._replace(
            pages=pages, drawing=drawing, memory=memory, feature_values=feature_values
        )

    return jax.lax.while_loop(lambda state: jnp.any(state.is_alive), run_step, state)


def _verifying_batch(
    rows: DecodeRows,
    state: DraftingState,
    sampling_rows: jax.Array,  # i32[num_rows, NUM_COLUMNS]
    drafts: jax.Array,  # i32[num_rows, max_drafts]
    num_drafts: jax.Array,  # i32[num_rows]
) -> tuple[ForwardBatch, jax.Array]:  # and i32[num_rows * (1 + max_drafts), step_row_width]
    """The batch of each row's last token and its drafts, and the columns that draw after them.

    num_drafts [1, 0, 2] -> query_start_loc [0, 2, 3, 6] -> row of each token [0, 0, 1, 2, 2, 2].
    """
    num_rows, max_drafts = drafts.shape
    row_idx = jnp.arange(num_rows, dtype=jnp.int32)
    num_queries = jnp.where(row_idx < rows.num_used, 1 + num_drafts, 0)
    ends = jnp.cumsum(num_queries, dtype=jnp.int32)
    query_start_loc = jnp.pad(ends, (1, 0))
    places = jnp.arange(num_rows * (1 + max_drafts), dtype=jnp.int32)
    row = jnp.searchsorted(ends, places, side="right").astype(jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    draw_idx = jnp.minimum(places - query_start_loc[row], max_drafts)
    is_token = places < ends[-1]
    last = jnp.take_along_axis(state.token_ids, state.positions[:, None], axis=1)
    given_ids = jnp.concatenate([last, drafts], axis=1)
    token_ids = jnp.where(is_token, given_ids[row, draw_idx], 0)
    positions = jnp.where(is_token, state.positions[row] + draw_idx, 0)
    batch = make_batch(
        token_ids=token_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=jnp.where(num_queries > 0, state.positions + num_queries, 0),
        block_tables=rows.block_tables,
        table_shapes=rows.table_shapes,
        logits_indices=places,
        wants=Wants(logits="indices"),
        widths=rows.widths,
    )
    fields = {
        "sampling_rows": sampling_rows[row],
        "draw_position": jnp.where(is_token & state.is_alive[row], positions + 1, 0),
        "token_ids": token_ids,
        "logits_indices": places,
        "draw_idx": draw_idx,
        "draw_req": row,
    }
    return batch, join_step_rows(fields, num_rows=places.shape[0])


def _append_drawn(
    rows: DecodeRows,
    state: DraftingState,
    drawn: jax.Array,  # i32[num_tokens, result_width]
    sampling: jax.Array,  # i32[num_tokens, step_row_width]
    num_drafts: jax.Array,  # i32[num_rows]
    max_drafts: int,
) -> DraftingState:
    """Appends the draws up to the first wrong draft, or to the token that ends the row."""
    (num_rows, max_tokens), num_draws = state.token_ids.shape, 1 + max_drafts
    shape = SamplerShape(
        num_rows=drawn.shape[0],
        num_reqs=num_rows,
        max_draws=num_draws,
        max_model_len=max_tokens,
        chunk_rows=drawn.shape[0],
    )
    drawn = accept_drafts(drawn, sampling, shape)
    drawn_ids = drawn[:, :, 0].T
    draw_idx = jnp.arange(num_draws, dtype=jnp.int32)
    drawn_positions = state.positions[:, None] + 1 + draw_idx
    is_ending = jnp.any(drawn_ids[:, :, None] == rows.ending_ids[:, None], axis=2)
    is_ending &= drawn_positions >= rows.first_end[:, None]
    num_ends_before = jnp.cumsum(is_ending, axis=1) - is_ending
    is_kept = (drawn_ids != NO_TOKEN) & state.is_alive[:, None] & (num_ends_before == 0)
    num_kept = is_kept.sum(axis=1, dtype=jnp.int32)
    num_drawn = state.num_drawn + num_kept
    has_ended = jnp.any(is_kept & is_ending, axis=1)
    is_alive = state.is_alive & ~has_ended & (num_drawn < rows.num_tokens)
    row_idx = jnp.arange(num_rows, dtype=jnp.int32)
    # A place past the end is not written.
    token_places = jnp.where(is_kept, drawn_positions, max_tokens)
    result_places = jnp.where(is_kept, state.num_drawn[:, None] + draw_idx, state.results.shape[0])
    steps = jnp.where(draw_idx[:, None] == 0, 1 + num_drafts, 0)
    results = jnp.concatenate([drawn, steps[:, :, None]], axis=2)
    return state._replace(
        token_ids=state.token_ids.at[row_idx[:, None], token_places].set(drawn_ids, mode="drop"),
        positions=jnp.where(is_alive, state.positions + num_kept, state.positions),
        num_drawn=num_drawn,
        is_alive=is_alive,
        results=state.results.at[result_places.T, row_idx].set(results, mode="drop"),
        num_steps=state.num_steps + 1,
    )
