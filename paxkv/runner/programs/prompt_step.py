"""The compiled step that also finds log-probabilities of prompts: one program, for any step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import KVCache, LoadedModel
from paxkv.runner.batch.packed_layout import PackedLayout
from paxkv.runner.programs.bucketing import StepShape
from paxkv.runner.programs.step import Params, unpack_batch, write_logits
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH, pack_result
from paxkv.runner.sampling.sampler import with_logprobs
from paxkv.runner.sampling.sampling_columns import join_step_rows

# (params, kv_cache, packed, prev_tokens, logits) -> (kv_cache, logits, sampling, prompt_result)
PromptStepFunction = Callable[
    [Params, KVCache, jax.Array, jax.Array, jax.Array],
    tuple[KVCache, jax.Array, jax.Array, jax.Array],
]
# Tokens whose logits are there at once: all of them would be the largest array of the engine.
_CHUNK_TOKENS = 32


def make_prompt_step(model: LoadedModel, shape: StepShape) -> PromptStepFunction:
    """`make_step` with `prompt_result` i32[num_tokens, prompt_row_width] beside its own results.

    A row of it is that of a token: log-probabilities of the one that follows it, and of the most
    likely ones (`pack_result`); then its logits, where the shape has them.
    """
    layout = PackedLayout(shape)

    def step(
        params: Params,
        kv_cache: KVCache,
        packed: jax.Array,  # i32[num_words]
        prev_tokens: jax.Array,  # i32[max_num_seqs]
        logits: jax.Array,  # f32[max_num_seqs, vocab], of an earlier step, to be overwritten
    ) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
        fields = layout.unpack(packed)
        batch = unpack_batch(fields, prev_tokens, shape)
        outputs, kv_cache = model.forward(params, kv_cache, batch)
        logits = write_logits(model, params, batch, outputs.for_logits, logits)
        prompt_result = _find_logprobs(model, params, outputs.hidden, fields, shape)
        sampling = join_step_rows(fields, max_num_seqs=prev_tokens.shape[0])
        return kv_cache, logits, sampling, prompt_result

    return step


def _find_logprobs(
    model: LoadedModel,
    params: Params,
    hidden: jax.Array,  # f[num_tokens, hidden]
    fields: dict[str, jax.Array],
    shape: StepShape,
) -> jax.Array:  # i32[num_tokens, prompt_row_width]
    num_tokens = hidden.shape[0]
    chunk = min(_CHUNK_TOKENS, num_tokens)

    def find_chunk(chunk_idx: jax.Array, result: jax.Array) -> jax.Array:
        # The last chunk may begin earlier than it would, and find some rows again.
        start = jnp.minimum(chunk_idx * chunk, num_tokens - chunk)
        chunk_hidden = jax.lax.dynamic_slice_in_dim(hidden, start, chunk)
        next_ids = jax.lax.dynamic_slice_in_dim(fields["next_ids"], start, chunk)
        rows = next_token_rows(model.compute_logits(params, chunk_hidden), next_ids, shape)
        return jax.lax.dynamic_update_slice_in_dim(result, rows, start, axis=0)

    num_chunks = (fields["query_start_loc"][-1] + chunk - 1) // chunk
    result = jnp.zeros((num_tokens, prompt_row_width(shape)), jnp.int32)
    return jax.lax.fori_loop(0, num_chunks, find_chunk, result)


def next_token_rows(
    logits: jax.Array,  # f32[num_tokens, vocab]
    next_ids: jax.Array,  # i32[num_tokens]
    shape: StepShape,
) -> jax.Array:  # i32[num_tokens, prompt_row_width]
    """The result of tokens that were not drawn, but follow."""
    rows = pack_result(with_logprobs(logits, next_ids))
    if not shape.num_prompt_logits:
        return rows
    return jnp.concatenate([rows, jax.lax.bitcast_convert_type(logits, jnp.int32)], axis=1)


def prompt_row_width(shape: StepShape) -> int:
    """Words of a row of `prompt_result`."""
    return RESULT_WIDTH + shape.num_prompt_logits
