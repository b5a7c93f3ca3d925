"""The compiled burst: decode steps of the same requests in one loop on the device."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import ForwardBatch, KVCache, LoadedModel, Wants, Width
from paxkv.runner.batch.packed_layout import PackedLayout
from paxkv.runner.programs.bucketing import BurstShape
from paxkv.runner.programs.step import Params, take_tokens
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN, RESULT_WIDTH, pack_result
from paxkv.runner.sampling.sampler import argmax_grouped, sample
from paxkv.runner.sampling.sampling_columns import SamplingInputs

# (params, kv_cache, packed, prev_tokens) -> (kv_cache, result, next_tokens)
BurstFunction = Callable[
    [Params, KVCache, jax.Array, jax.Array], tuple[KVCache, jax.Array, jax.Array]
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BurstState:
    """What one decode step of a burst leaves to the next.

    A row that has ended stands still: it computes its last token again, at the same position, and
    so writes what is there already.
    """

    step_idx: jax.Array  # i32[]
    token_ids: jax.Array  # i32[num_reqs], to be computed next
    positions: jax.Array  # i32[num_reqs], of those
    is_alive: jax.Array  # bool[num_reqs], whether the row takes part in the next step
    drawn_ids: jax.Array  # i32[num_reqs], the last token that each row drew
    kv_cache: KVCache
    # f32[num_reqs, vocab], room for those of a step; None where the burst has one width.
    logits: jax.Array | None
    result: jax.Array  # i32[max_steps, num_reqs, RESULT_WIDTH]


def make_burst(model: LoadedModel, shape: BurstShape) -> BurstFunction:
    """The burst of one shape, not yet compiled; which draws its tokens itself.

    It takes up to `num_steps` steps. A row takes part in the first `num_tokens` of them, and in
    none after it has drawn a token that ends its request; the burst ends when no row is left.
    Its result i32[max_steps, num_reqs, RESULT_WIDTH] has `NO_TOKEN` where a row drew nothing.
    `next_tokens` i32[max_num_seqs] are the last tokens drawn.
    """
    layout = PackedLayout(shape)

    def burst(
        params: Params,
        kv_cache: KVCache,
        packed: jax.Array,  # i32[num_words]
        prev_tokens: jax.Array,  # i32[max_num_seqs]
    ) -> tuple[KVCache, jax.Array, jax.Array]:
        fields = layout.unpack(packed)
        num_steps = fields["num_steps"][0]

        def is_running(state: BurstState) -> jax.Array:
            return (state.step_idx < num_steps) & jnp.any(state.is_alive)

        def run_step(state: BurstState) -> BurstState:
            return _run_step(model, params, fields, shape, state)

        state = _first_state(model, shape, fields, kv_cache, take_tokens(fields, prev_tokens))
        if shape.max_steps == 1:
            state = run_step(state)
        else:
            state = jax.lax.while_loop(is_running, run_step, state)
        num_unused = prev_tokens.shape[0] - shape.num_reqs
        return state.kv_cache, state.result, jnp.pad(state.drawn_ids, (0, num_unused))

    return burst


def _first_state(
    model: LoadedModel,
    shape: BurstShape,
    fields: dict[str, jax.Array],
    kv_cache: KVCache,
    token_ids: jax.Array,  # i32[num_reqs]
) -> BurstState:
    vocab = model.config.vocab_size
    return BurstState(
        step_idx=jnp.int32(0),
        token_ids=token_ids,
        positions=fields["positions"],
        is_alive=fields["num_tokens"] > 0,
        drawn_ids=token_ids,
        kv_cache=kv_cache,
        logits=jnp.zeros((shape.num_reqs, vocab), jnp.float32) if shape.widths else None,
        result=jnp.full((shape.max_steps, shape.num_reqs, RESULT_WIDTH), NO_TOKEN, jnp.int32),
    )


def _run_step(
    model: LoadedModel,
    params: Params,
    fields: dict[str, jax.Array],
    shape: BurstShape,
    state: BurstState,
) -> BurstState:
    batch = _batch_of(fields, shape, state)
    outputs, kv_cache = model.forward(params, state.kv_cache, batch)
    hidden = outputs.for_logits
    # The drawn token's own position: the draw must not depend on how steps are put together.
    draw_position = state.positions + 1
    inputs = SamplingInputs(rows=fields["sampling_rows"], draw_position=draw_position)
    if state.logits is None:
        logits, result = None, pack_result(sample(model.compute_logits(params, hidden), inputs))
    else:
        logits, greedy_ids = _find_logits(model, params, batch, hidden, state.logits)
        result = _sample_chunks(shape, batch.query_start_loc[-1], logits, greedy_ids, inputs)
    drawn_ids = jnp.where(state.is_alive, result[:, 0], state.drawn_ids)
    is_ending_id = jnp.any(drawn_ids[:, None] == fields["ending_ids"], axis=1)
    has_ended = is_ending_id & (draw_position >= fields["first_end"])
    is_alive = state.is_alive & ~has_ended & (state.step_idx + 1 < fields["num_tokens"])
    rows = jnp.where(state.is_alive[:, None], result, NO_TOKEN)
    return BurstState(
        step_idx=state.step_idx + 1,
        token_ids=jnp.where(is_alive, drawn_ids, state.token_ids),
        positions=jnp.where(is_alive, draw_position, state.positions),
        is_alive=is_alive,
        drawn_ids=drawn_ids,
        kv_cache=kv_cache,
        logits=logits,
        result=jax.lax.dynamic_update_index_in_dim(state.result, rows, state.step_idx, 0),
    )


def _find_logits(
    model: LoadedModel,
    params: Params,
    batch: ForwardBatch,
    hidden: jax.Array,  # f[num_reqs, hidden]
    room: jax.Array,  # f32[num_reqs, vocab]
) -> tuple[jax.Array, jax.Array]:  # f32[num_reqs, vocab], i32[num_reqs]
    """Logits at the step's width, and the most likely tokens; other rows are anything."""

    def find(width: Width, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = model.compute_logits(params, width.read(hidden))
        parts = (logits, argmax_grouped(logits))
        return tuple(map(width.write, carry, parts))

    return batch.at_width(find, (room, jnp.zeros(room.shape[0], jnp.int32)))


def _sample_chunks(
    shape: BurstShape,
    num_used: jax.Array,  # i32[], rows with a request
    logits: jax.Array,  # f32[num_reqs, vocab]
    greedy_ids: jax.Array,  # i32[num_reqs]
    inputs: SamplingInputs,
) -> jax.Array:  # i32[num_reqs, RESULT_WIDTH]
    """`sample` for the rows of requests, some at a time, and for none where all are greedy.

    Rows whose request wants no log-probabilities have some where another of the chunk does.
    """
    num_rows = shape.num_reqs
    chunk_rows = min(shape.chunk_rows, num_rows)

    def sample_chunk(chunk_idx: jax.Array, result: jax.Array) -> jax.Array:
        # The last chunk may begin earlier than it would, and draw some rows again, with the same
        # result.
        start = jnp.minimum(chunk_idx * chunk_rows, num_rows - chunk_rows)

        def rows_of(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, start, chunk_rows)

        chunk_inputs = jax.tree.map(rows_of, inputs)
        sampled = sample(rows_of(logits), chunk_inputs, greedy_ids=rows_of(greedy_ids))
        return jax.lax.dynamic_update_slice_in_dim(result, pack_result(sampled), start, axis=0)

    is_greedy = (inputs.temperature <= 0) & ~inputs.wants_logprobs
    num_chunks = jax.lax.div(num_used + chunk_rows - 1, chunk_rows)
    num_chunks = jnp.where(jnp.all(is_greedy), 0, num_chunks)
    result = jnp.pad(greedy_ids[:, None], ((0, 0), (0, RESULT_WIDTH - 1)))
    return jax.lax.fori_loop(0, num_chunks, sample_chunk, result)


def _batch_of(fields: dict[str, jax.Array], shape: BurstShape, state: BurstState) -> ForwardBatch:
    """One token a request; the rows without one come last, and their tokens belong to nobody."""
    is_used = fields["num_tokens"] > 0
    row_idx = jnp.arange(is_used.shape[0] + 1, dtype=jnp.int32)
    seq_lens = jnp.where(is_used, state.positions + 1, 0)
    num_groups = fields["block_tables"].shape[0]
    return ForwardBatch(
        token_ids=state.token_ids,
        positions=state.positions,
        query_start_loc=jnp.minimum(row_idx, is_used.sum(dtype=jnp.int32)),
        seq_lens=jnp.broadcast_to(seq_lens, (num_groups, *seq_lens.shape)),
        block_tables=fields["block_tables"],
        logits_indices=row_idx[:-1],
        max_query_len=1,
        wants=Wants(logits="last"),
        widths=shape.widths,
    )
