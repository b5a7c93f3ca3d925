"""The loop of decode steps on the device, which bursts and `CompiledGenerator` share."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Pages
from paxkv.runner.features.traced_features import NO_FEATURES, FeatureValues, TracedFeatures
from paxkv.runner.programs.make_batch import make_decode_batch
from paxkv.runner.programs.step import Params
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes.program_shapes import TableShape
from paxkv.runner.shapes.step_variant import StepPart


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """The rows of the loop, which are the same in all steps. A row has a request or is empty."""

    # Tokens that the row computes, at most one per step; 0 is a row that computes none.
    num_tokens: jax.Array  # i32[num_reqs]
    # Tokens that end the row if they are drawn for the position `first_end` or a later one. Unused
    # entries have an id that no token has.
    ending_ids: jax.Array  # i32[num_reqs, num_ending_ids]
    first_end: jax.Array  # i32[num_reqs]
    num_used: jax.Array | int  # i32[]; rows from here on are empty
    block_tables: tuple[jax.Array, ...]  # of `make_decode_batch`
    slot_switches: jax.Array | None = None  # of `make_decode_batch`
    table_shapes: tuple[TableShape, ...] = dataclasses.field(metadata={"static": True})
    widths: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """The state between two decode steps.

    A row that has ended computes its last token again, at the same position, so it writes the keys
    and values that are there already. In a model with states, it writes nothing.
    """

    step_idx: jax.Array  # i32[]
    token_ids: jax.Array  # i32[num_reqs], to be computed next
    positions: jax.Array  # i32[num_reqs], of `token_ids`
    is_alive: jax.Array  # bool[num_reqs], whether the row takes part in the next step
    drawn_ids: jax.Array  # i32[num_reqs], the last token that each row drew
    pages: Pages
    drawing: Any  # the state of `DrawFunction`, a pytree
    # The results of `DrawFunction`; `NO_TOKEN` where a row drew nothing.
    results: jax.Array  # i32[max_steps, num_reqs, result_width]
    feature_values: FeatureValues = ()  # of `TracedFeatures`, from step to step


# (params, batch, hidden, state) -> (result i32[num_reqs, result_width], drawing). Draws a token for
# each row that is alive, for the position after `state.positions`. A result starts with the token.
DrawFunction = Callable[
    [Params, ForwardBatch, jax.Array, DecodeState],
    tuple[jax.Array, Any],
]


def first_decode_state(
    *,
    token_ids: jax.Array,  # i32[num_reqs]
    positions: jax.Array,  # i32[num_reqs]
    is_alive: jax.Array,  # bool[num_reqs]
    pages: Pages,
    drawing: Any,
    max_steps: int,
    result_width: int,
    feature_values: FeatureValues = (),
) -> DecodeState:
    """Makes the state before the first step. The arguments are fields of `DecodeState`."""
    return DecodeState(
        step_idx=jnp.int32(0),
        token_ids=token_ids,
        positions=positions,
        is_alive=is_alive,
        drawn_ids=token_ids,
        pages=pages,
        drawing=drawing,
        results=jnp.full((max_steps, token_ids.shape[0], result_width), NO_TOKEN, jnp.int32),
        feature_values=feature_values,
    )


def run_decode_loop(
    model: LoadedModel,
    params: Params,
    rows: DecodeRows,
    state: DecodeState,
    draw: DrawFunction,
    *,
    num_steps: jax.Array | int,  # i32[], at most max_steps
    prompts: ForwardBatch | None = None,
    features: TracedFeatures = NO_FEATURES,
    fields: Mapping[str, jax.Array] = MappingProxyType({}),
) -> DecodeState:
    """Runs up to `num_steps` steps, until no row is alive.

    Args:
        prompts: The first step computes this batch instead of one token per row. `state` then has
            the last token of each prompt.
        fields: See `StepPart`.
    """

    def is_running(state: DecodeState) -> jax.Array:
        return (state.step_idx < num_steps) & jnp.any(state.is_alive)

    def run_step(state: DecodeState, batch: ForwardBatch | None = None) -> DecodeState:
        if batch is None:
            batch = _decode_batch(rows, state)
        return _run_step(model, params, batch, rows, state, draw, features, fields)

    if prompts is not None or state.results.shape[0] == 1:
        state = run_step(state, prompts)
    if state.results.shape[0] == 1:
        return state
    return jax.lax.while_loop(is_running, run_step, state)


def _decode_batch(rows: DecodeRows, state: DecodeState) -> ForwardBatch:
    return make_decode_batch(
        token_ids=state.token_ids,
        positions=state.positions,
        num_used=rows.num_used,
        block_tables=rows.block_tables,
        table_shapes=rows.table_shapes,
        widths=rows.widths,
        is_alive=state.is_alive,
        slot_switches=rows.slot_switches,
    )


def _run_step(
    model: LoadedModel,
    params: Params,
    batch: ForwardBatch,
    rows: DecodeRows,
    state: DecodeState,
    draw: DrawFunction,
    features: TracedFeatures,
    fields: Mapping[str, jax.Array],
) -> DecodeState:
    batch = features.add_wants(batch)
    part = StepPart(start=jnp.int32(0), batch=batch, fields=fields)
    apply = functools.partial(features.apply, part=part, values=state.feature_values)
    outputs, pages = model.forward(params, state.pages, batch, apply)
    logits_of = functools.partial(model.compute_logits, params)
    feature_values = features.update(state.feature_values, outputs, part, logits_of)
    result, drawing = draw(params, batch, outputs.for_logits, state)
    drawn_ids = jnp.where(state.is_alive, result[:, 0], state.drawn_ids)
    drawn_position = state.positions + 1
    is_ending_id = jnp.any(drawn_ids[:, None] == rows.ending_ids, axis=1)
    has_ended = is_ending_id & (drawn_position >= rows.first_end)
    is_alive = state.is_alive & ~has_ended & (state.step_idx + 1 < rows.num_tokens)
    drawn = jnp.where(state.is_alive[:, None], result, NO_TOKEN)
    return DecodeState(
        step_idx=state.step_idx + 1,
        token_ids=jnp.where(is_alive, drawn_ids, state.token_ids),
        positions=jnp.where(is_alive, drawn_position, state.positions),
        is_alive=is_alive,
        drawn_ids=drawn_ids,
        pages=pages,
        drawing=drawing,
        results=jax.lax.dynamic_update_index_in_dim(state.results, drawn, state.step_idx, 0),
        feature_values=feature_values,
    )
