"""Tests of `paged_attention/xla_batch_invariant.py`: right results, and always the same bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.cases import (
    CASES,
    LONG_CASES,
    NARROW_CACHE_CASES,
    UINT16_CASES,
    build_inputs,
)
from pallas_kernels.paged_attention.xla_batch_invariant import paged_attention_batch_invariant
from tests.pallas_kernels.paged_attention.dense_attention import dense_attention
from tests.quick_compile import marked_sizes, quick_jit, slow_unless_named

TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 2e-2}


# Every rule and edge once, and the two ways to store narrower numbers: as they are and as integers.
# The other cases run with `pytest -m slow`.
QUICK_CASES = (
    "many_tiles_and_chunks",
    "mixed_chunks",  # they begin within tiles of keys
    "not_causal",
    "everything_float32",
    "mixed_float16_cache",
    "bfloat16_as_uint16",
)


@pytest.mark.parametrize(
    "case", slow_unless_named(CASES + LONG_CASES + NARROW_CACHE_CASES + UINT16_CASES, *QUICK_CASES)
)
def test_equals_dense_attention(case, attend):
    inputs = build_inputs(case)
    out, lse = attend(inputs, paged_attention_batch_invariant)
    expected_out, expected_lse = dense_attention(inputs)
    tolerance = TOLERANCES[case.dtype]
    np.testing.assert_allclose(out, expected_out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6, rtol=5e-6)


BLOCK_SIZE, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = 8, 2, 2, 16
MAX_REQS, MAX_BLOCKS, MAX_TOKENS, NUM_BLOCKS = 4, 32, 80, 200
# Chunks cut what a token sees as windows do.
RULES = marked_sizes(
    [{}, {"sliding_window": 21, "soft_cap": 3.0}, {"is_causal": False}], slow=[{"chunk_size": 48}]
)


def compiled(rules):
    return quick_jit(paged_attention, scale=0.3, batch_invariant=True, **dict(rules))


class Sequences:
    """Sequences of random keys and values. Each call of `attend` puts some into random blocks."""

    def __init__(self, lengths):
        rng = np.random.default_rng(0)
        shape = (NUM_KV_HEADS, max(lengths), HEAD_DIM)
        self.keys = [rng.normal(size=shape).astype(np.float32) for _ in lengths]
        self.values = [rng.normal(size=shape).astype(np.float32) for _ in lengths]
        heads = (NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM)
        self.queries = [rng.normal(size=(n, *heads)).astype(np.float32) for n in lengths]

    def attend(self, parts, rules, seed):
        """Outputs of each part `(sequence, first query token, end)`, in one batch."""
        rng = np.random.default_rng(seed)
        free_blocks = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
        shape = (1, 2 * NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        kv_cache = rng.normal(size=shape).astype(np.float32)
        tables = rng.integers(0, NUM_BLOCKS, (MAX_REQS, MAX_BLOCKS), np.int32)
        q = rng.normal(size=(MAX_TOKENS, NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM)).astype(np.float32)
        seq_lens, starts = np.zeros(MAX_REQS, np.int32), np.zeros(MAX_REQS + 1, np.int32)
        for req_idx, (sequence, first, end) in enumerate(parts):
            starts[req_idx + 1 :] = starts[req_idx] + end - first
            q[starts[req_idx] : starts[req_idx + 1]] = self.queries[sequence][first:end]
            seq_lens[req_idx] = end
            for block_idx in range(-(-end // BLOCK_SIZE)):
                block = tables[req_idx, block_idx] = free_blocks.pop()
                start = block_idx * BLOCK_SIZE
                length = min(BLOCK_SIZE, end - start)
                for part, source in enumerate((self.keys, self.values)):
                    written = source[sequence][:, start : start + length]
                    kv_cache[0, 2 * block + part, :, :length] = written
        arrays = (q, kv_cache, np.int32(0), tables, seq_lens, starts)
        out = np.asarray(compiled(tuple(rules.items()))(*map(jnp.asarray, arrays)))
        return [out[starts[i] : starts[i + 1]] for i in range(len(parts))]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_bits_do_not_depend_on_the_batch_the_blocks_or_the_pieces(rules):
    sequences = Sequences([150, 40, 9])
    is_causal = rules.get("is_causal", True)
    (alone,) = sequences.attend([(0, 140, 150)], rules, seed=1)
    beside = sequences.attend([(1, 20, 40), (2, 0, 9), (0, 140, 150)], rules, seed=2)
    np.testing.assert_array_equal(beside[2], alone)
    among = sequences.attend([(0, 120, 150), (1, 39, 40)], rules, seed=3)
    np.testing.assert_array_equal(among[0][20:], alone)
    if is_causal:
        first, second = (
            sequences.attend([(0, 140, 143)], rules, seed=4),
            sequences.attend([(2, 0, 9), (0, 143, 150)], rules, seed=5),
        )
        np.testing.assert_array_equal(np.concatenate([first[0], second[1]]), alone)


def test_other_bodies_are_refused():
    case = CASES[0]
    inputs = build_inputs(case)
    with pytest.raises(ValueError, match="no such implementation: got 'reference'"):
        paged_attention(*inputs.arrays, scale=1.0, batch_invariant=True, implementation="reference")
