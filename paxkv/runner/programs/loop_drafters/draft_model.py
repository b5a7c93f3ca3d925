"""Drafts of a smaller model inside a loop on the device."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import Pages, Width, run_at_width
from models.cache import rules
from models.loading.loaded_draft_model import LoadedDraftModel
from paxkv.runner.programs.loop_drafters.base import DraftedRows, LoopDrafter
from paxkv.runner.programs.make_batch import StateRows, make_decode_batch
from paxkv.runner.programs.step import Params
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampler import argmax_grouped


class _Drafting(NamedTuple):
    """State of the loop that computes the last known token of each row, and then its drafts."""

    token_ids: jax.Array  # i32[num_rows], to be computed next
    pages: Pages
    drafts: jax.Array  # i32[num_rows, num_drafts]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoopDrafter(LoopDrafter):
    """Runs a smaller model, which has keys and values of all tokens before the last known one.

    It computes that token and all drafts that the step verifies, so it has keys and values of
    every token that the step may accept.

    If the model has states, it first computes the tokens that they lack, including accepted drafts.
    After the last draft, it restores the states of this moment.

    Args:
        params: The arrays of `model`.
        widths: Numbers of rows that the model's layers can compute, as `StepShape.widths`.
    """

    model: LoadedDraftModel
    params: Params
    num_drafts: int
    widths: tuple[int, ...] = ()

    def propose(self, drafted: DraftedRows, pages: Pages, memory: Any) -> tuple[jax.Array, Pages]:
        if self.model.has_states:
            return self._propose_with_states(drafted, pages)
        rows, positions, num_useful = drafted.rows, drafted.positions, drafted.num_useful
        num_rows = positions.shape[0]
        num_turns = jnp.max(num_useful)
        last_ids = jnp.take_along_axis(drafted.token_ids, positions[:, None], axis=1)[:, 0]

        def extend(turn: jax.Array, state: _Drafting) -> _Drafting:
            batch = make_decode_batch(
                token_ids=state.token_ids,
                # A row with fewer drafts than others computes its last draft again.
                positions=positions + jnp.minimum(turn, num_useful),
                num_used=rows.num_used,
                block_tables=rows.block_tables,
                table_shapes=rows.table_shapes,
                widths=self.widths,
            )
            hidden, pages = self.model.run(self.params, state.pages, batch)
            # In the last turn, no row needs another draft.
            draft_ids = self._choose(hidden, rows.num_used, is_wanted=turn < num_turns)
            is_draft = turn < num_useful
            return _Drafting(
                token_ids=jnp.where(is_draft, draft_ids, state.token_ids),
                pages=pages,
                # There is no column for the last turn, which adds no draft.
                drafts=state.drafts.at[:, turn].set(
                    jnp.where(is_draft, draft_ids, NO_TOKEN), mode="drop"
                ),
            )

        drafts = jnp.full((num_rows, self.num_drafts), NO_TOKEN, jnp.int32)
        state = _Drafting(token_ids=last_ids, pages=pages, drafts=drafts)
        state = jax.lax.fori_loop(0, num_turns + 1, extend, state)
        return state.drafts, state.pages

    def _propose_with_states(
        self, drafted: DraftedRows, pages: Pages
    ) -> tuple[jax.Array, Pages]:  # i32[num_rows, num_drafts]
        rows, positions, num_useful = drafted.rows, drafted.positions, drafted.num_useful
        num_rows = positions.shape[0]
        query_start_loc = jnp.minimum(jnp.arange(num_rows + 1, dtype=jnp.int32), rows.num_used)
        known = drafted.known
        hidden, pages = self.model.run(self.params, pages, known)
        kept = self.model.keep_states(pages, known)
        draft_ids = self._choose(hidden[known.logits_indices], rows.num_used)
        for blocks in kept:
            draft_ids = rules.after(draft_ids, blocks)
        drafts = jnp.full((num_rows, self.num_drafts), NO_TOKEN, jnp.int32)
        drafts = drafts.at[:, 0].set(jnp.where(num_useful > 0, draft_ids, NO_TOKEN))

        def extend(turn: jax.Array, state: _Drafting) -> _Drafting:
            is_draft = turn < num_useful
            own_positions = positions + jnp.minimum(turn, num_useful)
            batch = make_decode_batch(
                token_ids=state.token_ids,
                positions=own_positions,
                num_used=rows.num_used,
                block_tables=rows.block_tables,
                table_shapes=rows.table_shapes,
                widths=self.widths,
                state_rows=StateRows(
                    num_computed=own_positions,
                    query_start_loc=query_start_loc,
                    is_alive=is_draft,
                    has_one_token_each=True,
                    # The slot to read and the slot to write are the one that `known` wrote.
                    reads_second=jnp.logical_not(drafted.writes_first),
                    writes_first=drafted.writes_first,
                ),
            )
            hidden, pages = self.model.run(self.params, state.pages, batch)
            draft_ids = self._choose(hidden, rows.num_used)
            return _Drafting(
                token_ids=jnp.where(is_draft, draft_ids, state.token_ids),
                pages=pages,
                drafts=state.drafts.at[:, turn].set(jnp.where(is_draft, draft_ids, NO_TOKEN)),
            )

        state = _Drafting(token_ids=draft_ids, pages=pages, drafts=drafts)
        state = jax.lax.fori_loop(1, jnp.max(num_useful), extend, state)
        return state.drafts, self.model.restore_states(state.pages, known, kept)

    def _choose(
        self,
        hidden: jax.Array,  # f[num_rows, hidden]
        num_used: jax.Array | int,
        is_wanted: jax.Array | None = None,
    ) -> jax.Array:  # i32[num_rows]
        num_rows = hidden.shape[0]

        def choose(width: Width, draft_ids: jax.Array) -> jax.Array:
            logits = self.model.compute_logits(self.params, width.read(hidden))
            return width.write(draft_ids, argmax_grouped(logits, self.model.kernels.mesh))

        return run_at_width(
            self.widths or (num_rows,),
            jnp.asarray(num_used, jnp.int32),
            choose,
            jnp.zeros(num_rows, jnp.int32),
            is_wanted=is_wanted,
        )
