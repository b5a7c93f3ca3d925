"""The compiled burst: decode steps of the same requests in one loop on the device."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Pages, Width
from paxkv.runner.features.traced_features import FeatureValues, TracedFeatures
from paxkv.runner.programs.decode_loop import (
    DecodeRows,
    DecodeState,
    first_decode_state,
    run_decode_loop,
)
from paxkv.runner.programs.make_batch import tables_of
from paxkv.runner.programs.step import Params, take_tokens
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH, pack_result
from paxkv.runner.sampling.sampler import argmax_grouped, sample
from paxkv.runner.sampling.sampling_columns import SamplingInputs
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import BurstShape

# (params, kv_cache, packed, prev_tokens, kept, donated) ->
# (kv_cache, result, next_tokens, donated)
BurstFunction = Callable[
    [Params, Pages, jax.Array, jax.Array, FeatureValues, FeatureValues],
    tuple[Pages, jax.Array, jax.Array, FeatureValues],
]


def make_burst(model: LoadedModel, shape: BurstShape) -> BurstFunction:
    """The burst of one shape, not yet compiled; which draws its tokens itself.

    It takes up to `num_steps` steps. A row takes part in the first `num_tokens` of them, and in
    none after it has drawn a token that ends its request; the burst ends when no row is left.
    Its result i32[max_steps, num_reqs, RESULT_WIDTH] has `NO_TOKEN` where a row drew nothing.
    `next_tokens` i32[max_num_seqs] are the last tokens drawn. Last come the donated arrays of the
    shape's features.
    """
    layout = PackedLayout(shape)

    def burst(
        params: Params,
        kv_cache: Pages,
        packed: jax.Array,  # i32[num_words]
        prev_tokens: jax.Array,  # i32[max_num_seqs]
        kept: FeatureValues = (),
        donated: FeatureValues = (),
    ) -> tuple[Pages, jax.Array, jax.Array, FeatureValues]:
        fields = layout.unpack(packed)
        num_reqs = shape.num_reqs
        features = TracedFeatures(shape.features, kept, num_tokens=num_reqs, num_reqs=num_reqs)
        has_request = fields["num_tokens"] > 0
        rows = DecodeRows(
            num_tokens=fields["num_tokens"],
            ending_ids=fields["ending_ids"],
            first_end=fields["first_end"],
            num_used=has_request.sum(dtype=jnp.int32),
            block_tables=tables_of(fields, shape),
            table_shapes=shape.tables,
            widths=shape.widths,
        )
        # Room for the logits of a step, where the burst has several widths.
        room = jnp.zeros((num_reqs, model.config.vocab_size), jnp.float32)
        state = first_decode_state(
            token_ids=take_tokens(fields, prev_tokens),
            positions=fields["positions"],
            is_alive=has_request,
            pages=kv_cache,
            drawing=room if shape.widths else None,
            max_steps=shape.max_steps,
            result_width=RESULT_WIDTH,
            feature_values=features.first_values(donated),
        )
        draw = functools.partial(_draw, model, shape, fields["sampling_rows"])
        num_steps = fields["num_steps"][0]
        state = run_decode_loop(
            model, params, rows, state, draw, num_steps=num_steps, features=features
        )
        next_tokens = jnp.pad(state.drawn_ids, (0, prev_tokens.shape[0] - num_reqs))
        _, donated = features.split(state.feature_values)
        return state.pages, state.results, next_tokens, donated

    return burst


def _draw(
    model: LoadedModel,
    shape: BurstShape,
    sampling_rows: jax.Array,  # i32[num_reqs, NUM_COLUMNS]
    params: Params,
    batch: ForwardBatch,
    hidden: jax.Array,  # f[num_reqs, hidden]
    state: DecodeState,
) -> tuple[jax.Array, jax.Array | None]:  # i32[num_reqs, RESULT_WIDTH], f32[num_reqs, vocab]
    # The drawn token's own position: the draw must not depend on how steps are put together.
    inputs = SamplingInputs(rows=sampling_rows, draw_position=state.positions + 1)
    if state.drawing is None:
        return pack_result(sample(model.compute_logits(params, hidden), inputs)), None
    logits, greedy_ids = _find_logits(model, params, batch, hidden, state.drawing)
    return _sample_chunks(shape, batch.query_start_loc[-1], logits, greedy_ids, inputs), logits


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
