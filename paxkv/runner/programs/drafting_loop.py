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
from paxkv.runner.programs.make_batch import StateRows, make_batch, spread_places
from paxkv.runner.programs.step import Params
from paxkv.runner.sampling.accept_drafts import accept_drafts
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampling_columns import join_step_rows
from paxkv.runner.shapes.program_shapes import SamplerShape
from paxkv.runner.shapes.step_variant import StepPart


class DraftingState(NamedTuple):
    """The state between two steps.

    A row that has ended computes a token again. This writes the keys and values that are there
    already. In a model with states, it writes nothing.
    """

    token_ids: jax.Array  # i32[num_rows, max_tokens], of prompt and output
    # i32[num_rows], of the last known token, or in a row that has ended of a computed token.
    positions: jax.Array
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
    # i32[num_rows], number of tokens in each row's state: all before the drafts of its last step.
    # None without states.
    num_in_state: jax.Array | None = None


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
    completes_states: bool = True,
    features: TracedFeatures = NO_FEATURES,
    fields: Mapping[str, jax.Array] = MappingProxyType({}),
) -> DraftingState:
    """Runs steps until each row has ended or drawn `rows.num_tokens` tokens.

    Each step draws 1 to `1 + num_drafts` tokens of a row. It verifies no draft after the last token
    that the row may draw, so the row writes only the positions that it would write without drafts.

    A step writes the states before its drafts. The next step of the row computes accepted drafts
    again. If the row has drawn all its tokens, this step computes nothing else.

    Args:
        rows: `widths` are numbers of tokens that a step can compute.
        completes_states: Whether the loop goes on until the states contain all tokens. This can
            take one more step, which computes accepted drafts again.
        fields: See `StepPart`.
    """

    def run_step(state: DraftingState) -> DraftingState:
        num_left = jnp.where(state.is_alive, rows.num_tokens - state.num_drawn - 1, 0)
        if rows.slot_switches is not None:
            # The state at the switch is saved, so a step must write exactly this state.
            num_before = rows.slot_switches - 1 - state.positions
            num_left = jnp.where(num_before > 0, jnp.minimum(num_left, num_before - 1), num_left)
        drafted = DraftedRows(
            rows=rows,
            token_ids=state.token_ids,
            positions=state.positions,
            num_useful=jnp.minimum(num_left, drafter.num_drafts),
        )
        if state.num_in_state is not None:
            known, writes_first = _known_batch(rows, state, drafter.num_drafts)
            drafted = drafted._replace(known=known, writes_first=writes_first)
        drafts, pages = drafter.propose(drafted, state.pages, state.memory)
        num_found = (drafts != NO_TOKEN).sum(axis=1, dtype=jnp.int32)
        num_drafts = jnp.minimum(num_found, drafted.num_useful)
        batch, sampling, row_of_token = _verifying_batch(
            rows, state, sampling_rows, drafts, num_drafts
        )
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
            row_of_token=row_of_token,
            first_draws=batch.query_start_loc[:-1] + _num_known(state) - 1,
            outputs=outputs,
            token_ids=after.token_ids,
            num_kept=after.num_drawn - state.num_drawn,
            is_alive=after.is_alive,
        )
        pages, memory = drafter.read_step(rows, step, pages, state.memory)
        return after._replace(
            pages=pages, drawing=drawing, memory=memory, feature_values=feature_values
        )

    def is_running(state: DraftingState) -> jax.Array:
        is_running = jnp.any(state.is_alive)
        if state.num_in_state is None or not completes_states:
            return is_running
        return is_running | jnp.any(state.num_in_state <= state.positions)

    return jax.lax.while_loop(is_running, run_step, state)


def _num_known(state: DraftingState) -> jax.Array:  # i32[num_rows]
    """Tokens without drafts that each row computes in the next step, the last one included."""
    if state.num_in_state is None:
        return jnp.ones_like(state.positions)
    return state.positions - jnp.minimum(state.num_in_state, state.positions) + 1


def _known_batch(
    rows: DecodeRows, state: DraftingState, max_drafts: int
) -> tuple[ForwardBatch, jax.Array | bool]:
    """The batch `DraftedRows.known`, and `writes_first`."""
    num_rows = state.positions.shape[0]
    is_used = jnp.arange(num_rows, dtype=jnp.int32) < rows.num_used
    num_known = jnp.where(is_used, _num_known(state), 0)
    num_tokens = num_rows * (1 + max_drafts)
    query_start_loc, row, place = spread_places(num_known, num_tokens)
    is_token = place >= 0
    positions = jnp.where(is_token, (state.positions - num_known + 1)[row] + place, 0)
    state_rows = _state_rows(rows, state, query_start_loc)
    narrow = tuple(width for width in rows.widths if width < num_tokens)
    batch = make_batch(
        token_ids=jnp.where(is_token, state.token_ids[row, positions], 0),
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=jnp.where(is_used, state.positions + 1, 0),
        block_tables=rows.block_tables,
        table_shapes=rows.table_shapes,
        logits_indices=jnp.maximum(query_start_loc[1:] - 1, 0),
        wants=Wants(logits="none", hidden="all"),
        widths=(*narrow, num_tokens) if narrow else (),
        state_rows=state_rows,
    )
    return batch, state_rows.writes_first


def _verifying_batch(
    rows: DecodeRows,
    state: DraftingState,
    sampling_rows: jax.Array,  # i32[num_rows, NUM_COLUMNS]
    drafts: jax.Array,  # i32[num_rows, max_drafts]
    num_drafts: jax.Array,  # i32[num_rows]
) -> tuple[ForwardBatch, jax.Array, jax.Array]:
    """The batch of each row's known tokens and its drafts, and what is drawn from it.

    num_drafts [1, 0, 2], one known token each -> query_start_loc [0, 2, 3, 6] -> row of each token
    [0, 0, 1, 2, 2, 2].

    Returns:
        The batch; the columns i32[num_rows * (1 + max_drafts), step_row_width] that draw after the
        last known token and after each draft; and the row of each token i32[num_tokens].
    """
    num_rows, max_drafts = drafts.shape
    is_used = jnp.arange(num_rows, dtype=jnp.int32) < rows.num_used
    num_known = _num_known(state)
    first_positions = state.positions - num_known + 1
    num_queries = jnp.where(is_used, num_known + num_drafts, 0)
    # With states, the accepted drafts of the last step are known tokens too.
    most_known = 1 if state.num_in_state is None else 1 + max_drafts
    query_start_loc, row, place = spread_places(num_queries, num_rows * (most_known + max_drafts))
    is_token = place >= 0
    positions = jnp.where(is_token, first_positions[row] + place, 0)
    draft_idx = place - num_known[row]
    token_ids = jnp.where(
        draft_idx < 0,
        state.token_ids[row, positions],
        drafts[row, jnp.clip(draft_idx, 0, max_drafts - 1)],
    )
    token_ids = jnp.where(is_token, token_ids, 0)
    state_rows = None
    if state.num_in_state is not None:
        state_rows = _state_rows(rows, state, query_start_loc)
    _, draw_req, draw_idx = spread_places(
        jnp.where(is_used, 1 + num_drafts, 0), num_rows * (1 + max_drafts)
    )
    is_draw, draw_idx = draw_idx >= 0, jnp.maximum(draw_idx, 0)
    first_draws = query_start_loc[:-1] + num_known - 1
    logits_indices = jnp.where(is_draw, first_draws[draw_req] + draw_idx, 0)
    batch = make_batch(
        token_ids=token_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=jnp.where(num_queries > 0, first_positions + num_queries, 0),
        block_tables=rows.block_tables,
        table_shapes=rows.table_shapes,
        logits_indices=logits_indices,
        wants=Wants(logits="indices"),
        widths=rows.widths,
        state_rows=state_rows,
    )
    fields = {
        "sampling_rows": sampling_rows[draw_req],
        "draw_position": jnp.where(
            is_draw & state.is_alive[draw_req], positions[logits_indices] + 1, 0
        ),
        "token_ids": token_ids,
        "logits_indices": logits_indices,
        "draw_idx": draw_idx,
        "draw_req": draw_req,
    }
    return batch, join_step_rows(fields, num_rows=logits_indices.shape[0]), row


def _state_rows(
    rows: DecodeRows,
    state: DraftingState,
    query_start_loc: jax.Array,  # i32[num_rows + 1]
) -> StateRows:
    """The rows of states, which are written before the drafts. See `make_decode_batch`."""
    is_alive = state.is_alive | (state.num_in_state <= state.positions)
    num_known = _num_known(state)
    num_computed = state.positions - num_known + 1
    switches = rows.slot_switches
    return StateRows(
        num_computed=num_computed,
        query_start_loc=query_start_loc,
        is_alive=is_alive,
        has_one_token_each=False,
        reads_second=False if switches is None else num_computed > switches,
        writes_first=False if switches is None else num_computed + num_known <= switches,
        state_ends=jnp.minimum(query_start_loc[:-1] + num_known, query_start_loc[1:]),
    )


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
    # A row that has drawn all its tokens moves to the last one that it has computed.
    num_computed = jnp.where(has_ended, 0, jnp.maximum(num_kept - 1, 0))
    num_passed = jnp.where(is_alive, num_kept, num_computed)
    row_idx = jnp.arange(num_rows, dtype=jnp.int32)
    # A place past the end is not written.
    token_places = jnp.where(is_kept, drawn_positions, max_tokens)
    result_places = jnp.where(is_kept, state.num_drawn[:, None] + draw_idx, state.results.shape[0])
    steps = jnp.where(draw_idx[:, None] == 0, 1 + num_drafts, 0)
    results = jnp.concatenate([drawn, steps[:, :, None]], axis=2)
    return state._replace(
        token_ids=state.token_ids.at[row_idx[:, None], token_places].set(drawn_ids, mode="drop"),
        positions=state.positions + num_passed,
        num_drawn=num_drawn,
        is_alive=is_alive,
        results=state.results.at[result_places.T, row_idx].set(results, mode="drop"),
        num_steps=state.num_steps + 1,
        num_in_state=None if state.num_in_state is None else state.positions + 1,
    )
