"""The program of `CompiledGenerator`: one step for all prompts, then the decode loop."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Wants
from models.decoder_spec import with_drafter
from paxkv.errors import ConfigError
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache, kv_cache_dtype
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.programs.decode_loop import (
    DecodeRows,
    DecodeState,
    first_decode_state,
    run_decode_loop,
)
from paxkv.runner.programs.drafting_loop import DraftingState, run_drafting_loop
from paxkv.runner.programs.generation_drafts import ModelDrafts
from paxkv.runner.programs.loop_drafters.draft_model import ModelLoopDrafter
from paxkv.runner.programs.loop_drafters.ngram import NgramLoopDrafter
from paxkv.runner.programs.make_batch import make_batch
from paxkv.runner.programs.step import Params
from paxkv.runner.sampling.accept_drafts import record_given
from paxkv.runner.sampling.draw_rows import draw_rows
from paxkv.runner.sampling.row_state import RowState, num_row_words, unpack_rows
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampler import sample
from paxkv.runner.sampling.sampling_columns import decode_step_rows, join_step_rows
from paxkv.runner.shapes.program_shapes import NgramShape, TableShape
from paxkv.runner.shapes.sampling_row import ROW


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateShape:
    """All static sizes of a compiled generation.

    Args:
        batch_size: Number of rows. Each row has one prompt.
        max_prompt_len: Largest number of tokens in a prompt.
        max_new_tokens: Largest number of tokens generated for a row.
        block_size: Token positions in a KV block.
        max_stop_ids: Largest number of token ids that end a row.
    """

    batch_size: int
    max_prompt_len: int
    max_new_tokens: int
    block_size: int = 16
    max_stop_ids: int = 8

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")

    @property
    def max_tokens_per_row(self) -> int:
        return self.max_prompt_len + self.max_new_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateInputs:
    """The arrays of a compiled generation. A row with an empty prompt generates nothing."""

    prompt_token_ids: jax.Array  # i32[batch_size, max_prompt_len], any padding after the prompt
    prompt_lens: jax.Array  # i32[batch_size], in [0, max_prompt_len]
    max_new_tokens: jax.Array  # i32[batch_size], in [1, max_new_tokens]
    stop_token_ids: jax.Array  # i32[batch_size, max_stop_ids], padded with the vocabulary's size
    sampling_rows: jax.Array  # i32[batch_size, NUM_COLUMNS], of `encode_sampling_params`
    # i32[batch_size, num_row_words], of `pack_row` with `max_tokens_per_row` as its max_model_len.
    # None: logits are not processed, whatever `sampling_rows` ask for. The program is smaller.
    packed_rows: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOutputs:
    """The generated tokens. The token that ends a row is included."""

    token_ids: jax.Array  # i32[batch_size, max_new_tokens], padded with 0
    num_tokens: jax.Array  # i32[batch_size], in [0, max_new_tokens]
    num_steps: jax.Array  # i32[], steps after that of the prompts


def make_generate(
    model: LoadedModel, shape: GenerateShape, *, drafts: NgramShape | ModelDrafts | None = None
) -> Callable[..., GenerateOutputs]:
    """Returns the pure function `(params, inputs, draft_params=()) -> outputs`, not yet compiled.

    The KV cache exists only while the function runs. It has room for all rows at their full length,
    in sliding-window layers too.

    Args:
        drafts: Verify these drafts. This changes the number of steps, but no token. `draft_params`
            are the parameters of the draft model.
    """
    draft_model = drafts.model if isinstance(drafts, ModelDrafts) else None
    kv_dtype = kv_cache_dtype(model.dtype, model.platform)
    spec = model.config.spec(kv_dtype)
    if draft_model is not None:
        spec = with_drafter(spec, draft_model.config.spec(kv_dtype))
    spec = spec.on_each_of(model.kernels.num_shards)
    groups = groups_of_spec(
        spec, block_size=shape.block_size, head_dim_step=model.platform.head_dim_step
    )
    places = groups.places(spec)
    num_layers = len(places) - (0 if draft_model is None else draft_model.config.num_layers)
    model = model.with_places(places[:num_layers])
    if draft_model is not None:
        draft_model = draft_model.with_places(places[num_layers:]).with_kernels(model.kernels)
    # The last token is returned, but its key and value are never computed.
    tables = groups.tables(shape.max_tokens_per_row - 1)
    has_states = any(table.is_state for table in tables)
    table_dims = [(t.num_groups, shape.batch_size, t.max_blocks_per_req) for t in tables]
    # Each row of each group owns a range of blocks. Block 0 is the null block.
    block_ends = list(itertools.accumulate(map(math.prod, table_dims), initial=1))

    def generate(
        params: Params, inputs: GenerateInputs, draft_params: Params = ()
    ) -> GenerateOutputs:
        rows = DecodeRows(
            num_tokens=inputs.max_new_tokens,
            ending_ids=inputs.stop_token_ids,
            first_end=jnp.zeros(shape.batch_size, jnp.int32),
            num_used=shape.batch_size,
            block_tables=tuple(
                _own_blocks(ends, table, shape.batch_size)
                for ends, table in zip(itertools.pairwise(block_ends), tables, strict=True)
            ),
            table_shapes=tables,
        )
        prompts = _prompt_batch(inputs, shape, rows)
        state = first_decode_state(
            token_ids=prompts.token_ids[prompts.logits_indices],
            positions=jnp.maximum(inputs.prompt_lens - 1, 0),
            is_alive=inputs.prompt_lens > 0,
            pages=empty_kv_cache(
                groups.config(block_ends[-1]), model.platform, kv_dtype, model.kernels.mesh
            ),
            drawing=_first_row_state(inputs, shape, model.config.vocab_size),
            max_steps=1 if drafts is not None else shape.max_new_tokens,
            result_width=1,
        )
        row_idx = jnp.arange(shape.batch_size, dtype=jnp.int32)
        sampling_rows = inputs.sampling_rows.at[:, ROW].set(row_idx)
        draw = functools.partial(_draw, model, sampling_rows)
        state = run_decode_loop(
            *(model, params, rows, state, draw), num_steps=shape.max_new_tokens, prompts=prompts
        )
        if drafts is None:
            return _outputs_of(state.results, state.step_idx - 1)
        first = _first_drafting_state(inputs, shape, state, has_states=has_states)
        if draft_model is None:
            drafter = NgramLoopDrafter(drafts)
        else:
            _, pages = draft_model.run(draft_params, first.pages, prompts)
            first = first._replace(pages=pages)
            drafter = ModelLoopDrafter(
                model=draft_model, params=draft_params, num_drafts=drafts.num_drafts
            )
        verify = functools.partial(_draw_drafts, model)
        last = run_drafting_loop(
            *(model, params, rows, first, sampling_rows, drafter, verify), completes_states=False
        )
        return _outputs_of(last.results, last.num_steps)

    return generate


def _first_drafting_state(
    inputs: GenerateInputs, shape: GenerateShape, state: DecodeState, *, has_states: bool
) -> DraftingState:
    """The state after the step of the prompts, which has drawn a token of each row."""
    token_ids = jnp.pad(inputs.prompt_token_ids, ((0, 0), (0, shape.max_new_tokens)))
    row_idx = jnp.arange(shape.batch_size, dtype=jnp.int32)
    first = jnp.pad(state.results[0], ((0, 0), (0, 1)))
    results = jnp.full((shape.max_new_tokens, *first.shape), NO_TOKEN, jnp.int32)
    return DraftingState(
        token_ids=token_ids.at[row_idx, inputs.prompt_lens].set(state.drawn_ids),
        positions=state.positions,
        num_drawn=(inputs.prompt_lens > 0).astype(jnp.int32),
        is_alive=state.is_alive,
        pages=state.pages,
        drawing=state.drawing,
        results=results.at[0].set(first),
        num_steps=jnp.int32(0),
        memory=(),
        # Rows that have ended have nothing to compute.
        num_in_state=state.positions + ~state.is_alive if has_states else None,
    )


def _outputs_of(
    results: jax.Array,  # i32[max_new_tokens, batch_size, 1 or more]
    num_steps: jax.Array,
) -> GenerateOutputs:
    token_ids = results[:, :, 0].T
    is_drawn = token_ids != NO_TOKEN
    return GenerateOutputs(
        token_ids=jnp.where(is_drawn, token_ids, 0),
        num_tokens=is_drawn.sum(axis=1, dtype=jnp.int32),
        num_steps=num_steps,
    )


def _own_blocks(
    ends: tuple[int, int], table: TableShape, batch_size: int
) -> jax.Array:  # i32[`TableShape.dims`]
    dims = (table.num_groups, batch_size, table.max_blocks_per_req)
    block_ids = jnp.arange(*ends, dtype=jnp.int32).reshape(dims)
    # A row keeps its state in one slot.
    return jnp.broadcast_to(block_ids, table.dims(batch_size))


def _prompt_batch(inputs: GenerateInputs, shape: GenerateShape, rows: DecodeRows) -> ForwardBatch:
    """All prompts as one batch, in the order of the rows."""
    # prompt_lens [2, 0, 3] -> query_start_loc [0, 2, 2, 5] -> row of each token [0, 0, 2, 2, 2].
    ends = jnp.cumsum(inputs.prompt_lens, dtype=jnp.int32)
    query_start_loc = jnp.pad(ends, (1, 0))
    token_idx = jnp.arange(shape.batch_size * shape.max_prompt_len, dtype=jnp.int32)
    row = jnp.searchsorted(ends, token_idx, side="right").astype(jnp.int32)
    row = jnp.minimum(row, shape.batch_size - 1)
    is_token = token_idx < ends[-1]
    positions = jnp.where(is_token, token_idx - query_start_loc[row], 0)
    return make_batch(
        token_ids=jnp.where(is_token, inputs.prompt_token_ids[row, positions], 0),
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=inputs.prompt_lens,
        block_tables=rows.block_tables,
        table_shapes=rows.table_shapes,
        logits_indices=jnp.maximum(ends - 1, 0),
        # Not "last": with it, rows with an empty prompt would have to come after all others.
        wants=Wants(logits="indices"),
    )


def _first_row_state(
    inputs: GenerateInputs, shape: GenerateShape, vocab_size: int
) -> RowState | None:
    if inputs.packed_rows is None:
        return None
    max_model_len = shape.max_tokens_per_row
    expected = (shape.batch_size, num_row_words(max_model_len, vocab_size))
    if inputs.packed_rows.shape != expected:
        raise ConfigError(
            f"packed_rows must have the shape {expected}, got {inputs.packed_rows.shape}. Pack "
            f"each row with {max_model_len=} and {vocab_size=}."
        )
    return unpack_rows(inputs.packed_rows, max_model_len=max_model_len, vocab_size=vocab_size)


def _draw(
    model: LoadedModel,
    sampling_rows: jax.Array,  # i32[batch_size, NUM_COLUMNS]
    params: Params,
    batch: ForwardBatch,
    hidden: jax.Array,  # f[batch_size, hidden]
    state: DecodeState,
) -> tuple[jax.Array, RowState | None]:  # i32[batch_size, 1]
    logits = model.compute_logits(params, hidden)
    num_rows = logits.shape[0]
    # With `draw_position` 0, the row draws nothing and its logits are not processed.
    draw_position = jnp.where(state.is_alive, state.positions + 1, 0)
    fields = {"sampling_rows": sampling_rows, "draw_position": draw_position}
    sampling = join_step_rows(fields, num_rows=num_rows)
    return _draw_any(model, logits, sampling, state.drawing)


def _draw_drafts(
    model: LoadedModel,
    params: Params,
    batch: ForwardBatch,
    hidden: jax.Array,  # f[num_tokens, hidden]
    sampling: jax.Array,  # i32[num_tokens, step_row_width]
    row_state: RowState | None,
) -> tuple[jax.Array, RowState | None]:  # i32[num_tokens, 1]
    logits = model.compute_logits(params, hidden)
    if row_state is not None:
        row_state = record_given(row_state, sampling)
    return _draw_any(model, logits, sampling, row_state)


def _draw_any(
    model: LoadedModel,
    logits: jax.Array,  # f32[num_rows, vocab]
    sampling: jax.Array,  # i32[num_rows, step_row_width]
    row_state: RowState | None,
) -> tuple[jax.Array, RowState | None]:  # i32[num_rows, 1]
    mesh = model.kernels.mesh
    if row_state is None:
        return sample(logits, decode_step_rows(sampling), mesh=mesh).token_ids[:, None], None
    num_rows = logits.shape[0]
    result, row_state = draw_rows(logits, row_state, sampling, None, chunk_rows=num_rows, mesh=mesh)
    return result[:, :1], row_state
