"""The compiled step, without its sampler, and the program of block copies."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Pages, Width, run_at_width
from paxkv.runner.features.traced_features import FeatureValues, TracedFeatures
from paxkv.runner.programs.make_batch import SlotBlocks, make_batch, tables_of
from paxkv.runner.sampling.sampling_columns import join_step_rows
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import StepShape
from paxkv.runner.shapes.step_variant import StepPart

Params = tuple[jax.Array, ...]
# (params, kv_cache, packed, prev_tokens, logits, kept, donated, slot_blocks) ->
# (kv_cache, logits, sampling, results, donated)
StepFunction = Callable[
    [
        Params,
        Pages,
        jax.Array,
        jax.Array,
        jax.Array,
        FeatureValues,
        FeatureValues,
        SlotBlocks,
    ],
    tuple[Pages, jax.Array, jax.Array, FeatureValues, FeatureValues],
]


def unpack_fields(
    layout: PackedLayout,
    packed: jax.Array,  # i32[num_words]
    prev_tokens: jax.Array,  # i32[max_num_seqs]
) -> dict[str, jax.Array]:
    """The fields of a step's buffer, with the `token_ids` of `select_tokens`."""
    fields = layout.unpack(packed)
    return fields | {"token_ids": select_tokens(fields, prev_tokens)}


def unpack_batch(
    fields: dict[str, jax.Array], shape: StepShape, slot_blocks: SlotBlocks = ()
) -> ForwardBatch:
    """Makes the model's input from the result of `unpack_fields`."""
    return make_batch(
        token_ids=fields["token_ids"],
        positions=fields["positions"],
        query_start_loc=fields["query_start_loc"],
        seq_lens=fields["seq_lens"],
        block_tables=tables_of(fields, shape, slot_blocks),
        table_shapes=shape.tables,
        logits_indices=fields["logits_indices"],
        wants=shape.wants,
        widths=shape.widths,
        state_ends=fields.get("state_ends"),
    )


def select_tokens(
    fields: dict[str, jax.Array],
    prev_tokens: jax.Array,  # i32[max_num_seqs]
) -> jax.Array:  # i32[num_tokens]
    """Reads each token from the host's `token_ids` or `prev_tokens`, as `token_source` says."""
    max_num_seqs = prev_tokens.shape[0]
    token_source = fields["token_source"]
    on_device = prev_tokens[jnp.minimum(token_source, max_num_seqs - 1)]
    return jnp.where(token_source < max_num_seqs, on_device, fields["token_ids"])


def make_step(model: LoadedModel, shape: StepShape) -> StepFunction:
    """The step of one shape, not yet compiled.

    It returns the logits f32[num_rows, vocab] of the rows of its `DrawPlan`, and `sampling`
    i32[num_rows, step_row_width]. The sampler (`make_sampler`) draws from both. It is a separate
    program, so that it is not compiled again with each of many steps. The step also returns the
    cache, the results of the shape's features, and their donated arrays.
    """
    layout = PackedLayout(shape)

    def step(
        params: Params,
        kv_cache: Pages,
        packed: jax.Array,  # i32[num_words]
        prev_tokens: jax.Array,  # i32[max_num_seqs]
        logits: jax.Array,  # f32[num_rows, vocab], of an earlier step, to be overwritten
        kept: FeatureValues = (),
        donated: FeatureValues = (),
        slot_blocks: SlotBlocks = (),
    ) -> tuple[Pages, jax.Array, jax.Array, FeatureValues, FeatureValues]:
        fields = unpack_fields(layout, packed, prev_tokens)
        features = TracedFeatures(
            shape.features, kept, num_tokens=shape.num_tokens, num_reqs=shape.num_reqs
        )
        batch = unpack_batch(fields, shape, slot_blocks)
        whole = StepPart(start=jnp.int32(0), batch=batch, fields=fields)
        values = features.first_values(donated)
        apply = functools.partial(features.apply, part=whole, values=values)
        outputs, kv_cache = model.forward(params, kv_cache, batch, apply)
        hidden, num_used = outputs.for_logits, batch.query_start_loc[-1]
        widths = batch.widths
        if shape.max_draws > 1:
            # Most steps draw one token per request, fewer than the rows for which there is room.
            row_ends = jnp.arange(1, hidden.shape[0] + 1, dtype=jnp.int32)
            num_used = jnp.max(jnp.where(fields["draw_position"] > 0, row_ends, 0))
            widths = (*widths, shape.num_reqs) if widths else ()
        logits = write_logits(model, params, hidden, logits, num_used=num_used, widths=widths)
        logits_of = functools.partial(model.compute_logits, params)
        values = features.update(values, outputs, whole, logits_of)
        sampling = join_step_rows(fields, num_rows=logits.shape[0])
        return kv_cache, logits, sampling, *features.split(values)

    return step


def write_logits(
    model: LoadedModel,
    params: Params,
    hidden: jax.Array,  # f[num_logits, hidden]
    logits: jax.Array,  # f32[num_rows, vocab]
    *,
    num_used: jax.Array,  # i32[]
    widths: tuple[int, ...],
) -> jax.Array:  # f32[num_rows, vocab]
    """Replaces at least the first `num_used` rows of `logits`; all of them if there are fewer.

    Args:
        widths: Numbers of rows that may be computed, in any order, besides all rows.
    """

    def write(width: Width, logits: jax.Array) -> jax.Array:
        part = model.compute_logits(params, width.read(hidden))
        # Needed even if the part is the whole: XLA cannot overwrite an array that nothing reads.
        return jax.lax.dynamic_update_slice_in_dim(logits, part, 0, axis=0)

    num_logits = hidden.shape[0]
    widths = tuple(sorted({min(width, num_logits) for width in (*widths, num_logits)}))
    return run_at_width(widths, jnp.minimum(num_used, num_logits), write, logits)


def make_block_copies(model: LoadedModel) -> Callable[[Pages, jax.Array], Pages]:
    """The program of `KernelSettings.copy_blocks`; separate, because few steps copy blocks."""

    def copy_blocks(kv_cache: Pages, block_copies: jax.Array) -> Pages:
        return model.kernels.copy_blocks(kv_cache, block_copies)

    return copy_blocks
