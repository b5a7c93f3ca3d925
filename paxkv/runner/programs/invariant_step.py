"""The compiled step whose numbers do not depend on the batch, for `--batch-invariant`."""

import jax
import jax.numpy as jnp

from models import ForwardBatch, KVCache, LoadedModel, Wants
from paxkv.runner.batch.packed_layout import PackedLayout
from paxkv.runner.programs.bucketing import StepShape
from paxkv.runner.programs.prompt_step import PromptStepFunction, next_token_rows, prompt_row_width
from paxkv.runner.programs.step import Params, StepFunction, take_tokens
from paxkv.runner.sampling.sampling_columns import join_step_rows

# The cache, logits f32[max_num_seqs, vocab], and the prompts' result, i32[num_tokens,
# prompt_row_width]: of no rows where nobody asked for it.
_TileState = tuple[KVCache, jax.Array, jax.Array]


def make_invariant_step(model: LoadedModel, shape: StepShape) -> StepFunction | PromptStepFunction:
    """The step of one shape with `tile_tokens`, not yet compiled; called like `make_step`'s, or
    like `make_prompt_step`'s.

    Its tokens go through the model a tile at a time, in order, and each as a request of its own
    that has one token: so every product and every sum has one shape, whatever the step holds, and
    a token's numbers depend on the keys and values before it alone. Those of its own tile are
    written before any token of the tile reads.
    """
    layout = PackedLayout(shape)
    tile_tokens = shape.tile_tokens
    assert tile_tokens is not None, "a batch-invariant step has tiles"

    def step(
        params: Params,
        kv_cache: KVCache,
        packed: jax.Array,  # i32[num_words]
        prev_tokens: jax.Array,  # i32[max_num_seqs]
        logits: jax.Array,  # f32[max_num_seqs, vocab], of an earlier step, to be overwritten
    ) -> tuple[KVCache, jax.Array, jax.Array] | tuple[KVCache, jax.Array, jax.Array, jax.Array]:
        fields = layout.unpack(packed)
        fields["token_ids"] = take_tokens(fields, prev_tokens)
        logits_row = _logits_rows(fields, num_logits=logits.shape[0])

        def run_tile(tile_idx: jax.Array, state: _TileState) -> _TileState:
            kv_cache, logits, prompt_result = state
            start = tile_idx * tile_tokens
            batch = _batch_of_tile(fields, start, tile_tokens)
            outputs, kv_cache = model.forward(params, kv_cache, batch)
            tile_rows = jax.lax.dynamic_slice_in_dim(logits_row, start, tile_tokens)
            tile_logits = model.compute_logits(params, outputs.for_logits)
            if shape.has_prompt_logprobs:
                next_ids = jax.lax.dynamic_slice_in_dim(fields["next_ids"], start, tile_tokens)
                rows = next_token_rows(tile_logits, next_ids, shape)
                prompt_result = jax.lax.dynamic_update_slice_in_dim(
                    prompt_result, rows, start, axis=0
                )
            return kv_cache, logits.at[tile_rows].set(tile_logits, mode="drop"), prompt_result

        num_tokens = fields["query_start_loc"][-1]
        num_tiles = (num_tokens + tile_tokens - 1) // tile_tokens
        num_prompt_rows = shape.num_tokens if shape.has_prompt_logprobs else 0
        prompt_result = jnp.zeros((num_prompt_rows, prompt_row_width(shape)), jnp.int32)
        kv_cache, logits, prompt_result = jax.lax.fori_loop(
            0, num_tiles, run_tile, (kv_cache, logits, prompt_result)
        )
        sampling = join_step_rows(fields, max_num_seqs=prev_tokens.shape[0])
        results = (kv_cache, logits, sampling)
        return (*results, prompt_result) if shape.has_prompt_logprobs else results

    return step


def _logits_rows(fields: dict[str, jax.Array], *, num_logits: int) -> jax.Array:  # i32[num_tokens]
    """Row of the logits that each token's go to; num_logits, which is none, for most of them."""
    num_tokens, num_wanted = fields["token_ids"].shape[0], fields["logits_indices"].shape[0]
    starts = fields["query_start_loc"]
    is_used = starts[1:] > starts[:-1]  # bool[num_reqs], and there are as many logits
    token_idx = jnp.where(is_used, fields["logits_indices"], num_tokens)
    rows = jnp.full(num_tokens, num_logits, jnp.int32)
    return rows.at[token_idx].set(jnp.arange(num_wanted, dtype=jnp.int32), mode="drop")


def _batch_of_tile(
    fields: dict[str, jax.Array],
    start: jax.Array,  # i32[], the tile's first token
    tile_tokens: int,
) -> ForwardBatch:
    starts, block_tables = fields["query_start_loc"], fields["block_tables"]
    token_idx = start + jnp.arange(tile_tokens, dtype=jnp.int32)
    num_reqs = block_tables.shape[1]
    req_idx = jnp.searchsorted(starts, token_idx, side="right").astype(jnp.int32) - 1
    positions = jax.lax.dynamic_slice_in_dim(fields["positions"], start, tile_tokens)
    num_used = jnp.clip(starts[-1] - start, 0, tile_tokens)
    row_idx = jnp.arange(tile_tokens + 1, dtype=jnp.int32)
    seq_lens = jnp.where(row_idx[:-1] < num_used, positions + 1, 0)
    return ForwardBatch(
        token_ids=jax.lax.dynamic_slice_in_dim(fields["token_ids"], start, tile_tokens),
        positions=positions,
        query_start_loc=jnp.minimum(row_idx, num_used),
        seq_lens=jnp.broadcast_to(seq_lens, (block_tables.shape[0], tile_tokens)),
        block_tables=block_tables[:, jnp.clip(req_idx, 0, num_reqs - 1)],
        logits_indices=row_idx[:-1],
        max_query_len=1,
        wants=Wants(logits="last"),
    )
