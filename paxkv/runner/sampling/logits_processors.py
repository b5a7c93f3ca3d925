"""Logits processors: masks, bad words, biases and penalties.

The order is vLLM's: the grammar's mask, allowed tokens, bad words, `logit_bias` and `min_tokens`,
then penalties. The logits of a row depend only on its own settings and tokens.

Source: vllm/v1/sample/sampler.py, vllm/v1/sample/ops/ and vllm/v1/sample/logits_processor/.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paxkv.runner.memory.device_mesh import keep_split
from paxkv.runner.sampling.row_state import ANY_TOKEN, BITS, RowState
from paxkv.runner.sampling.sampling_columns import ProcessorInputs, Processors

# Tokens of a row's history, and entries of its bias, per iteration of a loop.
_HISTORY_CHUNK = 256
_BIAS_CHUNK = 64


def needs_processing(
    inputs: ProcessorInputs,
    token_mask: jax.Array | None,  # i32[num_logits, 1 + vocab_words]
) -> jax.Array:  # bool[]
    """Whether any row's logits change at all."""
    # A row with only a history needs no processing: it has the history for n-gram drafts.
    has_any = ((inputs.processors & ~int(Processors.TOKEN_HISTORY)) != 0) | inputs.is_early
    return jnp.any(has_any if token_mask is None else has_any | (token_mask[:, 0] != 0))


def process_logits(
    logits: jax.Array,  # f32[num_logits, vocab]
    inputs: ProcessorInputs,
    state: RowState,
    token_mask: jax.Array | None,  # i32[num_logits, 1 + vocab_words]
    mesh: Mesh | None = None,
) -> jax.Array:  # f32[num_logits, vocab]
    """Returns the logits that tokens are drawn from. Processors that no row needs cost nothing.

    Args:
        token_mask: Word 0 of a row is 1 if the row has a mask. The other words have a bit for each
            token, set if the token is allowed. None: no row has a mask.
        mesh: The devices that the logits are split over, if there are several.
    """
    is_forbidden = _forbidden_tokens(logits.shape[1], inputs, state, token_mask)
    logits = jnp.where(is_forbidden, -jnp.inf, logits)
    for processors, process in (
        (Processors.BAD_WORDS, _ban_bad_words),
        (Processors.BIAS, _add_bias),
        (Processors.PENALTIES, _penalize),
    ):
        logits = jax.lax.cond(
            jnp.any(inputs.has(processors)),
            lambda logits, process=process: process(logits, inputs, state),
            lambda logits: logits,
            logits,
        )
        logits = keep_split(logits, mesh)
    return logits


def _forbidden_tokens(
    vocab_size: int, inputs: ProcessorInputs, state: RowState, token_mask: jax.Array | None
) -> jax.Array:  # bool[num_logits, vocab]
    """Finds tokens that grammars, allowed tokens, bad words of one token or `min_tokens` ban."""

    def where(is_bound: jax.Array, words: jax.Array) -> jax.Array:
        return jnp.where(is_bound[:, None], words, 0)

    words = where(inputs.has(Processors.FORBIDDEN), state.forbidden[inputs.row])
    if token_mask is not None:
        words |= where(token_mask[:, 0] != 0, ~token_mask[:, 1:])
    words |= where(inputs.is_early, state.early_ends[inputs.row])
    bits = (words[:, :, None] >> jnp.arange(BITS, dtype=jnp.int32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0


def _ban_bad_words(logits: jax.Array, inputs: ProcessorInputs, state: RowState) -> jax.Array:
    """Bans the last token of each bad word if the output ends with the word's other tokens."""
    num_logits, vocab_size = logits.shape
    words = state.bad_words[inputs.row]  # i32[num_logits, num_words, max_word_tokens]
    num_before = words.shape[2] - 1
    offsets = jnp.arange(-num_before, 0, dtype=jnp.int32)
    places = inputs.draw_position[:, None] + offsets  # i32[num_logits, num_before]
    last_tokens = state.token_ids[inputs.row[:, None], jnp.maximum(places, 0)]
    is_output = places >= inputs.num_prompt_tokens[:, None]
    before = words[:, :, :-1]
    is_equal = (before == last_tokens[:, None]) & is_output[:, None]
    is_complete = jnp.all(is_equal | (before == ANY_TOKEN), axis=2)
    last = words[:, :, -1]
    is_banned = is_complete & (last != ANY_TOKEN) & inputs.has(Processors.BAD_WORDS)[:, None]
    row_idx = jnp.arange(num_logits)[:, None]
    return logits.at[row_idx, jnp.where(is_banned, last, vocab_size)].set(-jnp.inf, mode="drop")


def _add_bias(logits: jax.Array, inputs: ProcessorInputs, state: RowState) -> jax.Array:
    num_logits, vocab_size = logits.shape
    has_bias = inputs.has(Processors.BIAS)
    token_ids = jnp.where(has_bias[:, None], state.bias_ids[inputs.row], vocab_size)
    biases = jax.lax.bitcast_convert_type(state.bias_bits[inputs.row], jnp.float32)
    row_idx = jnp.arange(num_logits)[:, None]

    def add_chunk(chunk_idx: jax.Array, logits: jax.Array) -> jax.Array:
        ids, values = (
            jax.lax.dynamic_slice_in_dim(array, chunk_idx * _BIAS_CHUNK, _BIAS_CHUNK, axis=1)
            for array in (token_ids, biases)
        )
        return logits.at[row_idx, ids].add(values, mode="drop")

    num_biases = jnp.max(jnp.sum(token_ids < vocab_size, axis=1, dtype=jnp.int32))
    num_chunks = (num_biases + _BIAS_CHUNK - 1) // _BIAS_CHUNK
    return jax.lax.fori_loop(0, num_chunks, add_chunk, logits)


def _penalize(logits: jax.Array, inputs: ProcessorInputs, state: RowState) -> jax.Array:
    """Applies repetition, frequency and presence penalties. Neutral penalties change nothing."""
    in_prompt, in_output = _count_tokens(logits.shape[1], inputs, state)
    repetition = inputs.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((in_prompt > 0) | (in_output > 0), repeated, logits)
    logits -= inputs.frequency_penalty[:, None] * in_output.astype(jnp.float32)
    return logits - inputs.presence_penalty[:, None] * (in_output > 0)


def _count_tokens(
    vocab_size: int, inputs: ProcessorInputs, state: RowState
) -> tuple[jax.Array, jax.Array]:
    """Counts each token in a row's prompt and in its output: i32[num_logits, vocab] each."""
    num_logits = inputs.row.shape[0]
    max_model_len = state.token_ids.shape[1]
    chunk = min(_HISTORY_CHUNK, max_model_len)
    num_tokens = jnp.where(inputs.has(Processors.PENALTIES), inputs.draw_position, 0)
    row_idx = jnp.arange(num_logits)[:, None]

    def count_chunk(chunk_idx: jax.Array, counts: jax.Array) -> jax.Array:
        first = chunk_idx * chunk
        # The last chunk begins early enough to be full, and skips places that were counted.
        start = jnp.minimum(first, max_model_len - chunk)
        places = start + jnp.arange(chunk, dtype=jnp.int32)
        tokens = state.token_ids[inputs.row[:, None], places[None]]
        is_counted = (places >= first) & (places < num_tokens[:, None])
        is_output = places >= inputs.num_prompt_tokens[:, None]
        column = jnp.where(is_counted, tokens, vocab_size)
        return counts.at[is_output.astype(jnp.int32), row_idx, column].add(1, mode="drop")

    num_chunks = (jnp.max(num_tokens) + chunk - 1) // chunk
    counts = jnp.zeros((2, num_logits, vocab_size), jnp.int32)
    in_prompt, in_output = jax.lax.fori_loop(0, num_chunks, count_chunk, counts)
    return in_prompt, in_output
