"""A decode loop that verifies n-gram drafts: draft, verify, accept, and draft again on the device.

Each token is drawn with the randomness of its position, as in a loop without drafts, so the tokens
are the same. See `sampling/accept_drafts.py`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import LoadedModel, Pages, Wants
from paxkv.runner.programs.decode_loop import DecodeRows
from paxkv.runner.programs.make_batch import make_batch
from paxkv.runner.programs.step import Params
from paxkv.runner.sampling.accept_drafts import accept_drafts, record_given
from paxkv.runner.sampling.draw_rows import draw_rows
from paxkv.runner.sampling.row_state import RowState
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampler import sample
from paxkv.runner.sampling.sampling_columns import decode_step_rows, join_step_rows
from paxkv.runner.shapes.program_shapes import SamplerShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NgramShape:
    """The static sizes of n-gram drafts.

    Args:
        num_drafts: Drafts of each row in a step.
        shortest: The smallest number of tokens to find.
        longest: The largest number of tokens to find.
    """

    num_drafts: int
    shortest: int
    longest: int


class DraftingState(NamedTuple):
    """The state between two steps. A row that has ended computes its last tokens again."""

    token_ids: jax.Array  # i32[num_rows, max_tokens], of prompt and output
    num_tokens: jax.Array  # i32[num_rows]; the last of them has not been computed
    num_drawn: jax.Array  # i32[num_rows]
    is_alive: jax.Array  # bool[num_rows]
    pages: Pages
    row_state: RowState | None
    num_steps: jax.Array  # i32[]


def run_drafting_loop(
    model: LoadedModel,
    params: Params,
    rows: DecodeRows,
    state: DraftingState,
    sampling_rows: jax.Array,  # i32[num_rows, NUM_COLUMNS]
    ngram: NgramShape,
) -> DraftingState:
    """Runs steps until no row is alive. Each step draws 1 to `1 + num_drafts` tokens of each row.

    Args:
        rows: `first_end` is not read: ending ids end a row at any position. The block tables have
            room for the drafts after a row's last token.
    """

    def run_step(state: DraftingState) -> DraftingState:
        return _run_step(model, params, rows, state, sampling_rows, ngram)

    return jax.lax.while_loop(lambda state: jnp.any(state.is_alive), run_step, state)


def find_ngram_drafts(
    token_ids: jax.Array,  # i32[num_rows, max_tokens]
    num_tokens: jax.Array,  # i32[num_rows], at least 1
    ngram: NgramShape,
) -> jax.Array:  # i32[num_rows, num_drafts], 0 where there is no draft
    """Finds the drafts of `drafters/ngram.py`: after the first of the longest matches."""
    ends = jnp.arange(token_ids.shape[1], dtype=jnp.int32)  # of matches
    lengths = jnp.zeros(token_ids.shape, jnp.int32)
    is_equal = ends < num_tokens[:, None]
    for offset in range(1, ngram.longest + 1):
        place = num_tokens[:, None] - offset
        last = jnp.take_along_axis(token_ids, jnp.maximum(place, 0), axis=1)
        is_equal &= (jnp.roll(token_ids, offset, axis=1) == last) & (ends >= offset)
        lengths += is_equal
    longest = jnp.max(lengths, axis=1)
    # `argmax` returns the first.
    first = jnp.argmax(lengths == longest[:, None], axis=1).astype(jnp.int32)
    places = first[:, None] + jnp.arange(ngram.num_drafts, dtype=jnp.int32)
    found = jnp.take_along_axis(token_ids, places, axis=1, mode="clip")
    is_draft = (longest >= ngram.shortest)[:, None] & (places < num_tokens[:, None])
    return jnp.where(is_draft, found, 0)


def _run_step(
    model: LoadedModel,
    params: Params,
    rows: DecodeRows,
    state: DraftingState,
    sampling_rows: jax.Array,
    ngram: NgramShape,
) -> DraftingState:
    num_rows, num_draws = state.num_tokens.shape[0], 1 + ngram.num_drafts
    last_idx = state.num_tokens[:, None] - 1
    last = jnp.take_along_axis(state.token_ids, last_idx, axis=1)
    drafts = find_ngram_drafts(state.token_ids, state.num_tokens, ngram)
    token_ids = jnp.concatenate([last, drafts], axis=1).reshape(-1)
    draw_idx = jnp.arange(num_draws, dtype=jnp.int32)
    positions = (last_idx + draw_idx).reshape(-1)
    places = jnp.arange(num_rows * num_draws, dtype=jnp.int32)
    batch = make_batch(
        token_ids=token_ids,
        positions=positions,
        query_start_loc=jnp.arange(num_rows + 1, dtype=jnp.int32) * num_draws,
        seq_lens=state.num_tokens + ngram.num_drafts,
        block_tables=rows.block_tables,
        table_shapes=rows.table_shapes,
        logits_indices=places,
        wants=Wants(logits="indices"),
    )
    outputs, pages = model.forward(params, state.pages, batch)
    logits = model.compute_logits(params, outputs.for_logits)
    fields = {
        "sampling_rows": jnp.repeat(sampling_rows, num_draws, axis=0),
        "draw_position": jnp.where(jnp.repeat(state.is_alive, num_draws), positions + 1, 0),
        "token_ids": token_ids,
        "logits_indices": places,
        "draw_idx": places % num_draws,
        "draw_req": places // num_draws,
    }
    sampling = join_step_rows(fields, num_rows=places.shape[0])
    drawn, row_state = _draw(logits, state.row_state, sampling, model.kernels.mesh)
    shape = SamplerShape(
        num_rows=places.shape[0],
        num_reqs=num_rows,
        max_draws=num_draws,
        max_model_len=state.token_ids.shape[1],
        chunk_rows=places.shape[0],
    )
    drawn = accept_drafts(drawn, sampling, shape)[:, :, 0].T
    is_kept = (drawn != NO_TOKEN) & (state.num_drawn[:, None] + draw_idx < rows.num_tokens[:, None])
    is_ending = jnp.any(drawn[:, :, None] == rows.ending_ids[:, None], axis=2)
    num_ends_before = jnp.cumsum(is_ending, axis=1) - is_ending
    is_kept &= num_ends_before == 0
    num_kept = is_kept.sum(axis=1, dtype=jnp.int32)
    num_drawn = state.num_drawn + num_kept
    max_tokens = state.token_ids.shape[1]
    written_idx = jnp.where(is_kept, state.num_tokens[:, None] + draw_idx, max_tokens)
    row_idx = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return DraftingState(
        token_ids=state.token_ids.at[row_idx, written_idx].set(drawn, mode="drop"),
        num_tokens=state.num_tokens + num_kept,
        num_drawn=num_drawn,
        is_alive=state.is_alive
        & ~jnp.any(is_kept & is_ending, axis=1)
        & (num_drawn < rows.num_tokens),
        pages=pages,
        row_state=row_state,
        num_steps=state.num_steps + 1,
    )


def _draw(
    logits: jax.Array,  # f32[num_draws of all rows, vocab]
    row_state: RowState | None,
    sampling: jax.Array,  # i32[num_draws of all rows, step_row_width]
    mesh: Mesh | None,
) -> tuple[jax.Array, RowState | None]:  # i32[num_draws of all rows, 1 or more]
    if row_state is None:
        sampled = sample(logits, decode_step_rows(sampling), mesh=mesh)
        return sampled.token_ids[:, None], None
    row_state = record_given(row_state, sampling)
    num_draws = logits.shape[0]
    return draw_rows(logits, row_state, sampling, None, chunk_rows=num_draws, mesh=mesh)
