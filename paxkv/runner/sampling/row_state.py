"""`RowState`: the device's data of running requests whose logits are changed before a draw.

A row holds its request's tokens. Draws that need counts of tokens count them again, because stored
counts would take `9 * vocab` bytes per row: 87 MB for 64 rows of Qwen3's vocabulary. The whole
state takes 14 MB with 40,960 tokens per row.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.config.sampling_params import (
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIASES,
    SamplingParams,
    is_wide,
)
from paxkv.runner.memory.zeros import put_zeros
from paxkv.runner.sampling.sampling_columns import Processors
from paxkv.runner.shapes.program_shapes import RowShape

# Fills the front of a bad word that is shorter than the others. Every token matches it.
ANY_TOKEN = -1
BITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowState:
    """One row per row of the `InputBatch`. Rows of requests that need no state are undefined."""

    token_ids: jax.Array  # i32[max_num_seqs, max_model_len], prompt and output by position
    forbidden: jax.Array  # i32[max_num_seqs, vocab_words], bit set: never drawn
    early_ends: jax.Array  # i32[max_num_seqs, vocab_words], bit set: not drawn below min_tokens
    bias_ids: jax.Array  # i32[max_num_seqs, MAX_LOGIT_BIASES], padded with the vocabulary's size
    bias_bits: jax.Array  # i32[max_num_seqs, MAX_LOGIT_BIASES], of f32
    bad_words: jax.Array  # i32[max_num_seqs, MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS]


def vocab_words(vocab_size: int) -> int:
    """Returns how many int32 words hold one bit for each token."""
    return -(-vocab_size // BITS)


def row_fields(max_model_len: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of one row of each field of a `RowState`."""
    return {
        "token_ids": (max_model_len,),
        "forbidden": (vocab_words(vocab_size),),
        "early_ends": (vocab_words(vocab_size),),
        "bias_ids": (MAX_LOGIT_BIASES,),
        "bias_bits": (MAX_LOGIT_BIASES,),
        "bad_words": (MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS),
    }


def num_row_words(max_model_len: int, vocab_size: int) -> int:
    """Returns how many int32 words a packed row has: its index, then its fields."""
    fields = row_fields(max_model_len, vocab_size)
    return 1 + sum(math.prod(dims) for dims in fields.values())


def abstract_row_state(
    shape: RowShape, vocab_size: int, sharding: jax.sharding.Sharding
) -> RowState:
    """Returns the state's shapes, without memory."""
    fields = row_fields(shape.max_model_len, vocab_size)
    return RowState(
        **{
            name: jax.ShapeDtypeStruct((shape.num_rows, *dims), jnp.int32, sharding=sharding)
            for name, dims in fields.items()
        }
    )


def allocate_row_state(
    shape: RowShape, vocab_size: int, sharding: jax.sharding.Sharding
) -> RowState:
    """Allocates a state of zeros."""
    return jax.tree.map(
        lambda array: put_zeros(array.shape, array.dtype, sharding),
        abstract_row_state(shape, vocab_size, sharding),
    )


def write_row(
    state: RowState,
    packed: jax.Array,  # i32[num_row_words]
) -> RowState:
    """Returns the state with one row replaced by a row of `pack_row`, under `jit`."""
    dims = {field.name: getattr(state, field.name).shape[1:] for field in dataclasses.fields(state)}
    return jax.tree.map(
        lambda array, row: jax.lax.dynamic_update_slice_in_dim(array, row, packed[0], axis=0),
        state,
        _split_rows(packed[None], dims),
    )


def unpack_rows(
    packed: jax.Array,  # i32[num_rows, num_row_words]
    *,
    max_model_len: int,
    vocab_size: int,
) -> RowState:
    """Makes a state of rows of `pack_row` in their order, under `jit`. Ignores row indices."""
    return _split_rows(packed, row_fields(max_model_len, vocab_size))


def _split_rows(
    packed: jax.Array,  # i32[num_rows, num_row_words]
    dims: Mapping[str, tuple[int, ...]],
) -> RowState:
    fields, start = {}, 1
    for name, field_dims in dims.items():
        end = start + math.prod(field_dims)
        part = jax.lax.slice_in_dim(packed, start, end, axis=1)
        fields[name] = part.reshape(packed.shape[0], *field_dims)
        start = end
    return RowState(**fields)


def processors_of(
    params: SamplingParams,
    bad_words_token_ids: Sequence[Sequence[int]],
    *,
    needs_grammar: bool,
) -> Processors:
    """Returns the processors of a request's logits, without `min_tokens`.

    `min_tokens` is not among them, because its effect ends by itself (`ProcessorInputs.is_early`).
    """
    found = Processors(0)
    if params.has_penalties:
        found |= Processors.PENALTIES | Processors.TOKEN_HISTORY
    if any(len(word) > 1 for word in bad_words_token_ids):
        found |= Processors.BAD_WORDS | Processors.TOKEN_HISTORY
    if params.allowed_token_ids is not None or any(len(w) == 1 for w in bad_words_token_ids):
        found |= Processors.FORBIDDEN
    if params.logit_bias:
        found |= Processors.BIAS
    if needs_grammar:
        found |= Processors.GRAMMAR
    if is_wide(params.logprobs):
        found |= Processors.SHOWN
    return found


def pack_row(
    row_idx: int,
    token_ids_np: np.ndarray,  # i32[num_tokens], all tokens; the host must know them
    params: SamplingParams,
    *,
    bad_words_token_ids: Sequence[Sequence[int]],
    early_end_ids: Sequence[int],
    max_model_len: int,
    vocab_size: int,
) -> np.ndarray:  # i32[num_row_words]
    """Packs a request's row for `write_row`."""
    packed_np = np.zeros(num_row_words(max_model_len, vocab_size), np.int32)
    packed_np[0] = row_idx
    views, start = {}, 1
    for name, dims in row_fields(max_model_len, vocab_size).items():
        end = start + math.prod(dims)
        views[name] = packed_np[start:end].reshape(dims)
        start = end
    views["token_ids"][: len(token_ids_np)] = token_ids_np
    if params.allowed_token_ids is not None:
        views["forbidden"][:] = ~_bits_of(params.allowed_token_ids, vocab_size)
    banned = [word[0] for word in bad_words_token_ids if len(word) == 1]
    views["forbidden"][:] |= _bits_of(banned, vocab_size)
    views["early_ends"][:] = _bits_of(early_end_ids, vocab_size)
    biases = params.logit_bias or {}
    views["bias_ids"][:] = vocab_size
    views["bias_ids"][: len(biases)] = list(biases)
    views["bias_bits"][: len(biases)] = np.array(list(biases.values()), np.float32).view(np.int32)
    views["bad_words"][:] = ANY_TOKEN
    words = [word for word in bad_words_token_ids if len(word) > 1]
    for idx, word in enumerate(words):
        views["bad_words"][idx, -len(word) :] = word
    return packed_np


def _bits_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:  # i32[vocab_words]
    is_in_np = np.zeros(vocab_words(vocab_size) * BITS, np.uint8)
    is_in_np[list(token_ids)] = 1
    return np.packbits(is_in_np, bitorder="little").view("<i4")
