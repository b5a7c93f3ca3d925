"""Hashes in 64 bits are equal to hashes that Python's integers give."""

import functools

import jax
import numpy as np
import pytest

from models.layers.ngram_hash import hash_ngrams

# A product of token ids up to 248,319 has up to 63 bits. The sizes have 25, 1 and 31 bits.
MULTIPLIERS = (37_142_765_243_471, 2**45 + 1, 3)
TOKEN_IDS = np.array([[248_319, 0, 5], [0, 0, 0], [1, 248_319, 248_319], [70_000, 65_536, 65_535]])


def hashed_by_python(row: np.ndarray, sizes: tuple[int, ...]) -> list[int]:
    products = [int(token_id) * factor for token_id, factor in zip(row, MULTIPLIERS, strict=True)]
    hashes = [products[0] ^ products[1], products[0] ^ products[1] ^ products[2]]
    per_hash = len(sizes) // 2
    return [hashes[idx // per_hash] % size + sum(sizes[:idx]) for idx, size in enumerate(sizes)]


@pytest.mark.parametrize(
    "sizes",
    [(20_000_003, 20_000_023, 20_000_033, 20_000_047), (2, 3, 5, 7), (2**30 - 35, 11)],
)
def test_rows_are_remainders_of_mixed_products(sizes):
    call = jax.jit(functools.partial(hash_ngrams, multipliers=MULTIPLIERS, sizes=sizes))
    got = np.asarray(call(TOKEN_IDS.astype(np.int32)))
    np.testing.assert_array_equal(got, [hashed_by_python(row, sizes) for row in TOKEN_IDS])
