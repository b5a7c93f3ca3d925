"""`NGramConfig`: embeddings of n-grams of one layer, and the numbers by which they are hashed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from models.cache.state_format import StateFormat
from models.config.fields import read_count, read_layer_numbers, read_token_ids
from models.errors import ModelConfigError, UnsupportedModelError
from models.text_parts import TEXT_END

# Base-256 digits of a stored token id. Every dtype of states stores such a digit exactly.
NUM_DIGITS = 3
# `ngram_hash.py` keeps a remainder and at least one more bit of the hash in 32 bits.
_MAX_ROWS = 2**31
_MASK = 2**64 - 1
# The constants of SplitMix64, and the difference between the seeds of successive layers.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SEED_STEP = 10_007


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramConfig:
    """The embeddings of one layer.

    Each n-gram of 2 to `ngram_size` tokens is hashed by several heads. A head has rows of its own
    in the layer's table.

    Args:
        head_sizes: Rows of each head: first of the heads of 2-grams, then of 3-grams, and so on.
        num_rows: Rows of the table, with padding after the rows of all heads.
        num_parts: Most tensors into which a checkpoint splits the table.
        multipliers: A factor for each token of an n-gram, the newest token first.
        end_token_id: N-grams do not reach back over this token. It takes the place of all tokens
            before it, and of tokens before the start of the request.
    """

    ngram_size: int
    head_sizes: tuple[int, ...]
    head_dim: int
    num_rows: int
    num_parts: int
    multipliers: tuple[int, ...]
    end_token_id: int
    kernel_size: int  # of the convolution
    num_channels: int  # of the convolution

    @property
    def embed_dim(self) -> int:
        """Width of the embeddings of all heads together."""
        return len(self.head_sizes) * self.head_dim

    def format(self) -> StateFormat:
        """The last inputs of the convolution, and the digits of the last token ids, oldest first.

        Inputs and ids before the first token are zero. Stored ids are larger by 1.
        """
        window = ((self.kernel_size - 1) * self.ngram_size, self.num_channels)
        return StateFormat(shapes=(window, (self.ngram_size - 1, NUM_DIGITS)), num_windows=2)


def read_ngrams(
    hf_config: Mapping[str, object], has_state: Sequence[bool], *, num_streams: int
) -> tuple[NGramConfig | None, ...]:
    """Reads the embeddings of each layer; None for layers that are not in `ple_layer_ids`.

    `ple_layer_ids` counts layers from 1.

    Args:
        has_state: For each layer, whether it has a state in place of attention.

    Raises:
        ModelConfigError: A field is missing or malformed, or contradicts another.
        UnsupportedModelError: A layer with embeddings has attention, or hashes are too large.
    """
    layer_ids = sorted(set(read_layer_numbers(hf_config, "ple_layer_ids") or ()))
    found: list[NGramConfig | None] = [None] * len(has_state)
    if not layer_ids:
        return tuple(found)
    if not all(1 <= layer_id <= len(has_state) for layer_id in layer_ids):
        raise ModelConfigError(
            f"config.json: ple_layer_ids is {layer_ids}; expected numbers from 1 to "
            f"{len(has_state)}."
        )
    if not all(has_state[layer_id - 1] for layer_id in layer_ids):
        raise UnsupportedModelError(
            f"config.json: ple_layer_ids is {layer_ids}, counted from 1, and one of these layers "
            "has no linear attention; paxkv supports embeddings of n-grams only in layers with it."
        )
    # N-grams end at the end token of the text part. If the whole has another, it ends only answers.
    has_text_end = hf_config.get(TEXT_END) is not None
    end_token_ids = read_token_ids(hf_config, TEXT_END if has_text_end else "eos_token_id")
    if not end_token_ids:
        raise ModelConfigError(
            "config.json: eos_token_id is missing; expected a token id, because n-grams end at it."
        )
    hidden_size = read_count(hf_config, "hidden_size")
    vocab_size = read_count(hf_config, "vocab_size")
    ngram_size = read_count(hf_config, "ngram_size", 3, minimum=2)
    num_heads = (ngram_size - 1) * read_count(hf_config, "heads_per_ngram", 8)
    embed_dim = read_count(hf_config, "ple_embed_dim", hidden_size)
    if embed_dim % num_heads:
        raise ModelConfigError(
            f"config.json: ple_embed_dim is {embed_dim}; expected a multiple of {num_heads}, the "
            "number of heads of all n-grams."
        )
    if vocab_size >= 256**NUM_DIGITS:
        raise UnsupportedModelError(
            f"config.json: vocab_size is {vocab_size}; paxkv supports embeddings of n-grams for "
            f"fewer than {256**NUM_DIGITS} tokens."
        )
    seed = read_count(hf_config, "seed", 1234, minimum=0)
    step = read_count(hf_config, "make_ngram_vocab_size_divisible_by", 128)
    base = read_count(hf_config, "ngram_vocab_size_base", 20_000_000)
    _check_num_rows(base * num_heads)  # primes far above the limit would take hours to find
    primes = _primes_from(base)
    for ngram_idx, layer_id in enumerate(layer_ids):
        head_sizes = tuple(next(primes) for _ in range(num_heads))
        num_rows = math.ceil(sum(head_sizes) / step) * step
        _check_num_rows(num_rows)
        found[layer_id - 1] = NGramConfig(
            ngram_size=ngram_size,
            head_sizes=head_sizes,
            head_dim=embed_dim // num_heads,
            num_rows=num_rows,
            num_parts=read_count(hf_config, "split_ngram_parts", 512),
            multipliers=_multipliers(seed + _SEED_STEP * ngram_idx, ngram_size, vocab_size),
            end_token_id=end_token_ids[0],
            kernel_size=read_count(hf_config, "ple_conv_kernel_size", 4, minimum=2),
            num_channels=hidden_size * num_streams,
        )
    return tuple(found)


def _check_num_rows(num_rows: int) -> None:
    if num_rows >= _MAX_ROWS:
        raise UnsupportedModelError(
            f"config.json: ngram_vocab_size_base and heads_per_ngram give a layer {num_rows} "
            f"embeddings of n-grams or more; paxkv supports fewer than {_MAX_ROWS}."
        )


def _multipliers(seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    """Odd factors of token ids. Every product is below 2**63."""
    bound = max(1, (2**63 - 1) // vocab_size // 2)
    return tuple(2 * (_mixed(seed + _GOLDEN * idx) % bound) + 1 for idx in range(1, count + 1))


def _mixed(number: int) -> int:
    """A step of SplitMix64: an integer of 64 bits that looks random."""
    number = (number + _GOLDEN) & _MASK
    number = (number ^ (number >> 30)) * _MIX_1 & _MASK
    number = (number ^ (number >> 27)) * _MIX_2 & _MASK
    return number ^ (number >> 31)


def _primes_from(start: int) -> Iterator[int]:
    """The primes from `start` on."""
    number = max(start, 2)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1
