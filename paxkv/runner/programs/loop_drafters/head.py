"""Drafts of a head that reads the hidden states of its target, inside a loop on the device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Outputs, Pages, Wants, Width, run_at_width
from models.loading.loaded_head import LoadedHead
from paxkv.runner.features.head_memory import HeadMemory
from paxkv.runner.programs.decode_loop import DecodeRows
from paxkv.runner.programs.loop_drafters.base import DraftedRows, LoopDrafter, VerifiedStep
from paxkv.runner.programs.make_batch import make_decode_batch
from paxkv.runner.programs.step import Params
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampler import argmax_grouped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoopDrafter(LoopDrafter):
    """Runs the head over the tokens of each step, and then over its own drafts.

    Args:
        first: The memory before the first step. If it has no draft for a row, the row has no drafts
            in this step.
        model: The target. `params` are its arrays, and `head_params` the arrays of `head`.
        widths: Numbers of rows that the head's layers can compute, as `StepShape.widths`.
    """

    first: HeadMemory
    model: LoadedModel
    params: Params
    head: LoadedHead
    head_params: Params
    num_drafts: int
    widths: tuple[int, ...] = ()

    def first_memory(self, num_rows: int) -> HeadMemory:
        return self.first

    def propose(
        self, drafted: DraftedRows, pages: Pages, memory: HeadMemory
    ) -> tuple[jax.Array, Pages]:
        rows = drafted.rows
        num_drafts = jnp.where(memory.has_drafts, drafted.num_useful, 0)
        num_rows = num_drafts.shape[0]
        drafts = jnp.full((num_rows, self.num_drafts), NO_TOKEN, jnp.int32)
        drafts = drafts.at[:, 0].set(jnp.where(num_drafts > 0, memory.draft_ids, NO_TOKEN))

        def extend(
            turn: jax.Array, state: tuple[HeadMemory, jax.Array, Pages]
        ) -> tuple[HeadMemory, jax.Array, Pages]:
            last, drafts, pages = state
            # A row with fewer drafts than others computes its last token again.
            is_draft = turn < num_drafts
            token_ids = jnp.where(is_draft, last.draft_ids, last.token_ids)
            hidden = jnp.where(is_draft[:, None], last.next_hidden, last.hidden)
            positions = last.positions + is_draft
            batch = make_decode_batch(
                token_ids=token_ids,
                positions=positions,
                num_used=rows.num_used,
                block_tables=rows.block_tables,
                table_shapes=rows.table_shapes,
                widths=self.widths,
            )
            next_hidden, pages = self._run(pages, batch, hidden)
            draft_ids = self._choose(next_hidden, rows)
            last = HeadMemory(
                has_drafts=last.has_drafts,
                positions=positions,
                token_ids=token_ids,
                hidden=hidden,
                next_hidden=next_hidden,
                draft_ids=draft_ids,
            )
            drafts = drafts.at[:, turn].set(jnp.where(is_draft, draft_ids, NO_TOKEN))
            return last, drafts, pages

        state = (memory, drafts, pages)
        _, drafts, pages = jax.lax.fori_loop(1, jnp.max(num_drafts), extend, state)
        return drafts, pages

    def read_step(
        self, rows: DecodeRows, step: VerifiedStep, pages: Pages, memory: HeadMemory
    ) -> tuple[Pages, HeadMemory]:
        # The token after a rejected draft is arbitrary. Later steps overwrite its keys and values.
        next_positions = jnp.minimum(step.batch.positions + 1, step.token_ids.shape[1] - 1)
        token_ids = step.token_ids[step.row_of_token, next_positions]
        batch = dataclasses.replace(
            step.batch, token_ids=token_ids, wants=Wants(logits="none", hidden="all")
        )
        hidden = self.head.combine(self.head_params, self._read_target(step.outputs))
        next_hidden, pages = self._run(pages, batch, hidden)
        last_idx = step.first_draws + jnp.maximum(step.num_kept - 1, 0)
        # Rows without a request come last.
        last_idx = jnp.minimum(last_idx, token_ids.shape[0] - 1)
        next_hidden = next_hidden[last_idx]
        new = HeadMemory(
            has_drafts=step.num_kept > 0,
            positions=batch.positions[last_idx],
            token_ids=token_ids[last_idx],
            hidden=hidden[last_idx],
            next_hidden=next_hidden,
            draft_ids=self._choose(next_hidden, rows),
        )
        return pages, jax.tree.map(functools.partial(_replace_rows, new.has_drafts), memory, new)

    def _read_target(self, outputs: Outputs) -> jax.Array:  # f[num_tokens, width]
        return jnp.concatenate(outputs.taps, axis=-1) if self.head.taps else outputs.hidden

    def _run(
        self,
        pages: Pages,
        batch: ForwardBatch,
        hidden: jax.Array,  # f[num_tokens, hidden]
    ) -> tuple[jax.Array, Pages]:  # f[num_tokens, hidden]
        embed = functools.partial(self.model.embed, self.params)
        embedded = self.head.embed(self.head_params, batch.token_ids, embed)
        return self.head.run(self.head_params, pages, batch, embedded=embedded, hidden=hidden)

    def _choose(
        self,
        hidden: jax.Array,  # f[num_rows, hidden]
        rows: DecodeRows,
    ) -> jax.Array:  # i32[num_rows]
        num_rows = hidden.shape[0]
        logits_of = functools.partial(self.model.compute_logits, self.params)
        argmax = functools.partial(argmax_grouped, mesh=self.model.kernels.mesh)

        def choose(width: Width, draft_ids: jax.Array) -> jax.Array:
            chosen = self.head.choose(self.head_params, width.read(hidden), logits_of, argmax)
            return width.write(draft_ids, chosen)

        return run_at_width(
            self.widths or (num_rows,),
            jnp.asarray(rows.num_used, jnp.int32),
            choose,
            jnp.zeros(num_rows, jnp.int32),
        )


def _replace_rows(
    is_new: jax.Array,  # bool[num_rows]
    old: jax.Array,  # [num_rows, ...]
    new: jax.Array,  # [num_rows, ...]
) -> jax.Array:  # [num_rows, ...]
    return jnp.where(is_new.reshape(-1, *[1] * (new.ndim - 1)), new, old)
