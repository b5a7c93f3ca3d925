"""The compiled burst with drafts: the device proposes them, verifies them and goes on."""

import functools

import jax
import jax.numpy as jnp

from models import ForwardBatch, LoadedModel, Pages
from models.loading.loaded_draft_model import LoadedDrafter
from paxkv.runner.features.head_memory import head_memory_of, read_memory, write_memory
from paxkv.runner.features.traced_features import FeatureValues, TracedFeatures
from paxkv.runner.programs.burst import BurstFunction, find_logits
from paxkv.runner.programs.decode_loop import DecodeRows
from paxkv.runner.programs.drafting_loop import DraftingState, run_drafting_loop
from paxkv.runner.programs.loop_drafters.loop_drafter_list import make_loop_drafter
from paxkv.runner.programs.make_batch import SlotBlocks, tables_of
from paxkv.runner.programs.step import Params, select_tokens
from paxkv.runner.sampling.accept_drafts import record_given
from paxkv.runner.sampling.draw_rows import draw_rows
from paxkv.runner.sampling.row_state import RowState
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN, RESULT_WIDTH
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import BurstShape
from paxkv.runner.shapes.sampling_row import ROW, step_row_width

# What draws pass from one step to the next: logits f32[num_rows, vocab], and the rows' state.
_Drawing = tuple[jax.Array, RowState]


def make_drafting_burst(
    model: LoadedModel, shape: BurstShape, head: LoadedDrafter | None = None
) -> BurstFunction:
    """The burst of a shape with `drafts`, not yet compiled. It takes the arguments of `make_burst`.

    A row takes part until it has drawn `num_tokens` tokens, or a token that ends its request. With
    drafts, this takes fewer steps, but the tokens and the positions that are written are the same.
    Therefore the host knows the positions of the next burst before this one returns, and reserves
    no more blocks than for a burst without drafts.

    Every request must draw, and its tokens must be in the `RowState`. The result has one more
    column, the last one of `DraftingState.results`. The burst never leaves logits for the sampler.

    Args:
        head: The draft head or the draft model of a `DrafterShape`. The burst then takes its
            parameters as one more argument.
    """
    layout = PackedLayout(shape)

    def burst(
        params: Params,
        kv_cache: Pages,
        packed: jax.Array,  # i32[num_words]
        prev_tokens: jax.Array,  # i32[max_num_seqs]
        logits: jax.Array,  # f32[num_rows, vocab], of an earlier step, to be overwritten
        row_state: RowState,
        kept: FeatureValues = (),
        donated: FeatureValues = (),
        slot_blocks: SlotBlocks = (),
        head_params: Params = (),
    ) -> tuple[Pages, jax.Array, RowState, jax.Array, jax.Array, jax.Array, FeatureValues]:
        fields = layout.unpack(packed)
        num_reqs, max_num_seqs = shape.num_reqs, prev_tokens.shape[0]
        features = TracedFeatures(
            shape.features, kept, num_tokens=shape.num_tokens, num_reqs=num_reqs
        )
        has_request = fields["num_tokens"] > 0
        rows = DecodeRows(
            num_tokens=fields["num_tokens"],
            ending_ids=fields["ending_ids"],
            first_end=fields["first_end"],
            num_used=has_request.sum(dtype=jnp.int32),
            block_tables=tables_of(fields, shape, slot_blocks),
            slot_switches=fields.get("slot_switch"),
            table_shapes=shape.tables,
            widths=shape.widths,
        )
        first_ids, positions = select_tokens(fields, prev_tokens), fields["positions"]
        row_idx = jnp.arange(num_reqs, dtype=jnp.int32)
        token_ids = row_state.token_ids[fields["sampling_rows"][:, ROW]]
        kept = head_memory_of({name: array for arrays in donated for name, array in arrays.items()})
        memory = read_memory(kept, fields["tenancies"], positions) if kept else None
        drafter = make_loop_drafter(model, shape.drafts, head, params, head_params, memory)
        state = DraftingState(
            token_ids=token_ids.at[row_idx, positions].set(first_ids),
            positions=positions,
            num_drawn=jnp.zeros(num_reqs, jnp.int32),
            is_alive=has_request,
            pages=kv_cache,
            drawing=(logits, row_state),
            results=jnp.full((shape.max_steps, num_reqs, RESULT_WIDTH + 1), NO_TOKEN, jnp.int32),
            num_steps=jnp.int32(0),
            memory=drafter.first_memory(num_reqs),
            feature_values=features.first_values(donated),
            # Empty rows have nothing to compute.
            num_in_state=positions + ~has_request if shape.has_states else None,
        )
        state = run_drafting_loop(
            *(model, params, rows, state, fields["sampling_rows"], drafter),
            functools.partial(_draw, model, shape),
            features=features,
            fields=fields | {"token_ids": first_ids},
        )
        logits, row_state = state.drawing
        last_ids = state.results[jnp.maximum(state.num_drawn - 1, 0), row_idx, 0]
        next_tokens = jnp.pad(jnp.where(has_request, last_ids, 0), (0, max_num_seqs - num_reqs))
        sampling = jnp.zeros((max_num_seqs, step_row_width(1)), jnp.int32)
        _, donated = features.split(state.feature_values)
        if kept:
            kept = write_memory(kept, fields["tenancies"], state.memory)
            donated = tuple(
                {name: kept.get(name, array) for name, array in arrays.items()}
                for arrays in donated
            )
        return state.pages, logits, row_state, sampling, state.results, next_tokens, donated

    return burst


def _draw(
    model: LoadedModel,
    shape: BurstShape,
    params: Params,
    batch: ForwardBatch,
    hidden: jax.Array,  # f[num_tokens, hidden]
    sampling: jax.Array,  # i32[num_tokens, step_row_width]
    drawing: _Drawing,
) -> tuple[jax.Array, _Drawing]:  # i32[num_tokens, RESULT_WIDTH]
    logits, row_state = drawing
    logits, greedy_ids = find_logits(model, params, batch, hidden, logits)
    result, row_state = draw_rows(
        logits,
        record_given(row_state, sampling),
        sampling,
        None,
        chunk_rows=shape.chunk_rows,
        mesh=model.kernels.mesh,
        greedy_ids=greedy_ids,
    )
    return result, (logits, row_state)
