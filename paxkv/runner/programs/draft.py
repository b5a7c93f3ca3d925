"""The compiled program of a draft head or a draft model, which runs after a step."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Pages, Wants, Width, run_at_width
from models.cache import rules
from models.loading.loaded_draft_model import LoadedDrafter
from paxkv.runner.features.head_memory import HeadMemory, write_memory
from paxkv.runner.programs.make_batch import (
    SlotBlocks,
    StateRows,
    make_batch,
    make_decode_batch,
    spread_places,
    tables_of,
)
from paxkv.runner.programs.step import Params, unpack_fields
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampler import argmax_grouped
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import DraftShape

# (params, head_params, kv_cache, packed, prev_tokens, target_hidden, result, following_ids,
# num_proposed, memory, slot_blocks) -> (kv_cache, drafts, memory)
DraftFunction = Callable[
    [
        Params,
        Params,
        Pages,
        jax.Array,
        jax.Array,
        jax.Array,
        jax.Array,
        jax.Array,
        jax.Array,
        Mapping[str, jax.Array],
        SlotBlocks,
    ],
    tuple[Pages, jax.Array, Mapping[str, jax.Array]],
]


class _NextTokens(NamedTuple):
    """The tokens after the tokens of a step, and where drafts begin."""

    next_ids: jax.Array  # i32[num_tokens], the token after each token of the step
    # i32[num_reqs], index of the last token of each request that is not a rejected draft.
    last_idx: jax.Array
    has_drawn: jax.Array  # bool[num_reqs]


class _DraftState(NamedTuple):
    """The loop over drafts. A row that is not alive computes its last token again."""

    token_ids: jax.Array  # i32[num_reqs], the last token that the row computed
    hidden: jax.Array  # f[num_reqs, hidden], the input for that token
    positions: jax.Array  # i32[num_reqs]
    is_alive: jax.Array  # bool[num_reqs]
    next_hidden: jax.Array  # f[num_reqs, hidden], the output for that token
    draft_ids: jax.Array  # i32[num_reqs], the token that the row drafted last
    pages: Pages
    drafts: jax.Array  # i32[num_reqs, num_drafts]


def make_draft(model: LoadedModel, head: LoadedDrafter, shape: DraftShape) -> DraftFunction:
    """The program of one shape, not yet compiled.

    It first runs the head over all tokens of the step, so that the head has keys and values of
    every token. This gives the first draft of each request that drew a token. Then it drafts one
    token after the other. A draft model drafts every token in this loop. Tokens of rejected drafts
    are computed too. The next step of the request writes over their keys and values.

    The drafts' keys and values go to slots after the step's tokens. A request gets drafts only up
    to the end of its block table.

    A draft model with states writes the states before the drafts of the step, as its target does.
    It then computes the accepted drafts and the drawn token together, which gives the first draft.
    After the last draft, the program restores the states.

    The program returns `drafts` i32[num_reqs, shape.num_drafts], with `NO_TOKEN` after the last
    draft of each request. It also returns the memory for bursts, in which it has replaced the rows
    of requests that drew a token.
    """
    step = shape.step
    layout = PackedLayout(step)

    def draft(
        params: Params,
        head_params: Params,
        kv_cache: Pages,
        packed: jax.Array,  # i32[num_words], of the step
        prev_tokens: jax.Array,  # i32[max_num_seqs], of the step
        target_hidden: jax.Array | None,  # f[max_num_tokens, width]; None: not read
        result: jax.Array,  # i32[max_draws, max_num_seqs, RESULT_WIDTH], of the sampler
        following_ids: jax.Array,  # i32[num_reqs], see `BuiltStep`
        num_proposed: jax.Array,  # i32[], drafts of each request, in [1, shape.num_drafts]
        memory: Mapping[str, jax.Array],  # of `head_memory_arrays`; may be empty
        slot_blocks: SlotBlocks = (),
    ) -> tuple[Pages, jax.Array, Mapping[str, jax.Array]]:
        fields = unpack_fields(layout, packed, prev_tokens)
        tables = tables_of(fields, step, slot_blocks if head.has_states else None)
        starts, positions = fields["query_start_loc"], fields["positions"]
        following = _find_next_tokens(fields, result[:, :, 0], following_ids)
        target_embed = functools.partial(model.embed, params)

        def run(
            pages: Pages, batch: ForwardBatch, hidden: jax.Array | None
        ) -> tuple[jax.Array, Pages]:
            if not head.reads_hidden:
                return head.run(head_params, pages, batch)
            embedded = head.embed(head_params, batch.token_ids, target_embed)
            return head.run(head_params, pages, batch, embedded=embedded, hidden=hidden)

        # A draft model computes the tokens of the step, and a head the tokens after them.
        token_ids = following.next_ids if head.reads_hidden else fields["token_ids"]
        batch = make_batch(
            token_ids=token_ids,
            positions=positions,
            query_start_loc=starts,
            seq_lens=fields["seq_lens"],
            block_tables=tables,
            table_shapes=step.tables,
            logits_indices=fields["logits_indices"],
            wants=Wants(logits="none", hidden="all"),
            widths=shape.token_widths,
            state_ends=fields.get("state_ends"),
        )
        if target_hidden is not None:
            target_hidden = head.combine(head_params, target_hidden[: step.num_tokens])
        hidden, pages = run(kv_cache, batch, target_hidden)
        row_idx = jnp.arange(step.num_reqs + 1, dtype=jnp.int32)
        num_used = (starts[1:] > starts[:-1]).sum(dtype=jnp.int32)
        choose = functools.partial(_choose, model, head, shape, params, head_params, num_used)
        last_idx, has_drawn = following.last_idx, following.has_drawn
        drafts = jnp.full((step.num_reqs, shape.num_drafts), NO_TOKEN, jnp.int32)
        if head.reads_hidden:
            draft_ids = choose(hidden[last_idx])
            drafts = drafts.at[:, 0].set(jnp.where(has_drawn, draft_ids, NO_TOKEN))
        else:
            # A draft model computes the drawn token next, which gives the first draft.
            draft_ids = following.next_ids[last_idx]
        state = _DraftState(
            token_ids=token_ids[last_idx],
            hidden=(hidden if target_hidden is None else target_hidden)[last_idx],
            positions=positions[last_idx],
            is_alive=has_drawn,
            next_hidden=hidden[last_idx],
            draft_ids=draft_ids,
            pages=pages,
            drafts=drafts,
        )
        if memory:
            last = HeadMemory(
                has_drafts=has_drawn,
                positions=state.positions,
                token_ids=state.token_ids,
                hidden=state.hidden,
                next_hidden=state.next_hidden,
                draft_ids=state.draft_ids,
            )
            memory = write_memory(memory, fields["tenancies"], last)

        def compute_after_states(state: _DraftState, reads: Iterable[jax.Array]) -> _DraftState:
            is_alive = state.is_alive & _have_slots(head, shape, tables, state.positions + 1)
            next_ids = functools.reduce(rules.after, reads, following.next_ids)
            known = following._replace(next_ids=next_ids)
            after = _batch_after_states(shape, fields, tables, known, is_alive)
            next_hidden, pages = run(state.pages, after, None)
            next_hidden = next_hidden[after.logits_indices]
            draft_ids = choose(next_hidden)
            return state._replace(
                token_ids=state.draft_ids,
                positions=state.positions + is_alive,
                is_alive=is_alive,
                next_hidden=next_hidden,
                draft_ids=draft_ids,
                pages=pages,
                drafts=state.drafts.at[:, 0].set(jnp.where(is_alive, draft_ids, NO_TOKEN)),
            )

        def extend(draft_idx: jax.Array, state: _DraftState) -> _DraftState:
            is_alive = state.is_alive & _have_slots(head, shape, tables, state.positions + 1)
            token_ids = jnp.where(is_alive, state.draft_ids, state.token_ids)
            hidden = jnp.where(is_alive[:, None], state.next_hidden, state.hidden)
            positions = jnp.where(is_alive, state.positions + 1, state.positions)
            batch = make_decode_batch(
                token_ids=token_ids,
                positions=positions,
                num_used=num_used,
                block_tables=tables,
                table_shapes=step.tables,
                widths=shape.req_widths,
                state_rows=StateRows(
                    num_computed=positions,
                    query_start_loc=jnp.minimum(row_idx, num_used),
                    is_alive=is_alive,
                    has_one_token_each=True,
                    reads_second=True,
                ),
            )
            next_hidden, pages = run(state.pages, batch, hidden)
            draft_ids = choose(next_hidden)
            return _DraftState(
                token_ids=token_ids,
                hidden=hidden,
                positions=positions,
                is_alive=is_alive,
                next_hidden=next_hidden,
                draft_ids=draft_ids,
                pages=pages,
                drafts=state.drafts.at[:, draft_idx].set(jnp.where(is_alive, draft_ids, NO_TOKEN)),
            )

        if not head.has_states:
            first = int(head.reads_hidden)
            state = jax.lax.fori_loop(first, num_proposed, extend, state)
            return state.pages, state.drafts, memory
        kept = head.keep_states(pages, batch)
        state = compute_after_states(state, [hidden, *kept])
        state = jax.lax.fori_loop(1, num_proposed, extend, state)
        return head.restore_states(state.pages, batch, kept), state.drafts, memory

    return draft


def _batch_after_states(
    shape: DraftShape,
    fields: dict[str, jax.Array],
    tables: tuple[jax.Array, ...],
    following: _NextTokens,
    is_alive: jax.Array,  # bool[num_reqs]
) -> ForwardBatch:
    """The accepted drafts and the drawn token of each request that is alive."""
    step, most = shape.step, 1 + shape.num_drafts
    # The last token that is in the state.
    before_idx = jnp.maximum(fields["state_ends"] - 1, 0)
    num_computed = fields["positions"][before_idx] + 1
    num_tokens = jnp.where(is_alive, following.last_idx - before_idx + 1, 0)
    query_start_loc, row, place = spread_places(num_tokens, step.num_reqs * most)
    is_token, place = place >= 0, jnp.maximum(place, 0)
    return make_batch(
        token_ids=jnp.where(is_token, following.next_ids[before_idx[row] + place], 0),
        positions=jnp.where(is_token, num_computed[row] + place, 0),
        query_start_loc=query_start_loc,
        seq_lens=jnp.where(is_alive, num_computed + num_tokens, 0),
        block_tables=tables,
        table_shapes=step.tables,
        logits_indices=jnp.maximum(query_start_loc[1:] - 1, 0),
        wants=Wants(logits="none", hidden="all"),
        widths=tuple(most * width for width in shape.req_widths),
        state_rows=StateRows(
            num_computed=num_computed,
            query_start_loc=query_start_loc,
            is_alive=is_alive,
            has_one_token_each=False,
            # A step writes the second slot.
            reads_second=True,
        ),
    )


def _find_next_tokens(
    fields: dict[str, jax.Array],
    drawn_ids: jax.Array,  # i32[max_draws, max_num_seqs], `NO_TOKEN` after a rejected draft
    following_ids: jax.Array,  # i32[num_reqs]
) -> _NextTokens:
    """The next tokens of a step.

    Example: a request computes the prompt's last token 5 and the drafts 7, 8, and draws 7, 9. Its
    next tokens are 7, 9 and any token, and its last token is the first draft.
    """
    starts, token_ids = fields["query_start_loc"], fields["token_ids"]
    num_tokens, num_reqs = token_ids.shape[0], starts.shape[0] - 1
    last_of_reqs = jnp.maximum(starts[1:] - 1, 0)
    next_ids = jnp.concatenate([token_ids[1:], token_ids[:1]])
    has_tokens = starts[1:] > starts[:-1]
    next_ids = next_ids.at[jnp.where(has_tokens, last_of_reqs, num_tokens)].set(
        following_ids, mode="drop"
    )
    req_idx, draw_idx, token_idx = (
        fields[name] for name in ("draw_req", "draw_idx", "logits_indices")
    )
    drawn = drawn_ids[draw_idx, req_idx]
    is_drawn = fields["draw_position"] > 0
    is_kept = is_drawn & (drawn != NO_TOKEN)
    next_ids = next_ids.at[jnp.where(is_kept, token_idx, num_tokens)].set(drawn, mode="drop")
    num_kept = jnp.zeros(num_reqs, jnp.int32)
    num_kept = num_kept.at[jnp.where(is_kept, req_idx, num_reqs)].add(1, mode="drop")
    is_first = is_drawn & (draw_idx == 0)
    first_idx = jnp.zeros(num_reqs, jnp.int32)
    first_idx = first_idx.at[jnp.where(is_first, req_idx, num_reqs)].set(token_idx, mode="drop")
    has_drawn = num_kept > 0
    return _NextTokens(
        next_ids=next_ids,
        last_idx=jnp.where(has_drawn, first_idx + num_kept - 1, last_of_reqs),
        has_drawn=has_drawn,
    )


def _have_slots(
    head: LoadedDrafter,
    shape: DraftShape,
    tables: tuple[jax.Array, ...],
    positions: jax.Array,  # i32[num_reqs]
) -> jax.Array:  # bool[num_reqs]
    """Whether the request has a block for the position in each of the head's groups."""
    found = jnp.ones(positions.shape, bool)
    for _, place in (cache for places in head.places for cache in places):
        if place.format.kind == "state":
            continue
        table = tables[place.inputs_idx][place.group_idx]
        block_idx = positions // shape.step.tables[place.inputs_idx].block_size
        # Block 0 is the null block.
        rows = jnp.arange(positions.shape[0], dtype=jnp.int32)
        found &= table.at[rows, block_idx].get(mode="fill", fill_value=0) != 0
    return found


def _choose(
    model: LoadedModel,
    head: LoadedDrafter,
    shape: DraftShape,
    params: Params,
    head_params: Params,
    num_used: jax.Array,  # i32[], leading rows that are requests
    hidden: jax.Array,  # f[num_reqs, hidden]
) -> jax.Array:  # i32[num_reqs]
    """The most likely token of each request."""
    logits_of = functools.partial(model.compute_logits, params)
    argmax = functools.partial(argmax_grouped, mesh=model.kernels.mesh)

    def choose(width: Width, draft_ids: jax.Array) -> jax.Array:
        chosen = head.choose(head_params, width.read(hidden), logits_of, argmax)
        return width.write(draft_ids, chosen)

    widths = shape.req_widths or (shape.step.num_reqs,)
    return run_at_width(widths, num_used, choose, jnp.zeros(hidden.shape[0], jnp.int32))
