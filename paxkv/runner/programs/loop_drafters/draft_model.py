"""Drafts of a smaller model inside a loop on the device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import Pages, Width, run_at_width
from models.loading.loaded_draft_model import LoadedDraftModel
from paxkv.runner.programs.loop_drafters.base import DraftedRows, LoopDrafter
from paxkv.runner.programs.make_batch import make_decode_batch
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

    Args:
        params: The arrays of `model`.
        widths: Numbers of rows that the model's layers can compute, as `StepShape.widths`.
    """

    model: LoadedDraftModel
    params: Params
    num_drafts: int
    widths: tuple[int, ...] = ()

    def propose(self, drafted: DraftedRows, pages: Pages, memory: Any) -> tuple[jax.Array, Pages]:
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
            draft_ids = run_at_width(
                self.widths or (num_rows,),
                jnp.asarray(rows.num_used, jnp.int32),
                functools.partial(self._choose, hidden),
                jnp.zeros(num_rows, jnp.int32),
                # In the last turn, no row needs another draft.
                is_wanted=turn < num_turns,
            )
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

    def _choose(self, hidden: jax.Array, width: Width, draft_ids: jax.Array) -> jax.Array:
        logits = self.model.compute_logits(self.params, width.read(hidden))
        return width.write(draft_ids, argmax_grouped(logits, self.model.kernels.mesh))
