"""Tests of `paged_attention/xla_block_list.py`: which blocks are read, and in what order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import xla_block_list
from pallas_kernels.paged_attention.cases import CASES, build_inputs
from pallas_kernels.paged_attention.xla import paged_attention_xla
from pallas_kernels.paged_attention.xla_block_list import list_blocks
from tests.pallas_kernels.paged_attention.dense_attention import dense_attention
from tests.quick_compile import marked_sizes

GARBAGE = -7
# Request 0 reads two blocks from its first on, request 1 none, request 2 two from its second on.
BLOCK_TABLES = np.array(
    [[9, 4, GARBAGE], [GARBAGE, GARBAGE, GARBAGE], [GARBAGE, 6, 0]], dtype=np.int32
)
FIRST_NEEDED, NUM_NEEDED = np.array([0, 2, 1], np.int32), np.array([2, 0, 2], np.int32)


def entries(num_blocks):
    """(block id, request, logical block) of each entry, read three at a time."""

    @jax.jit
    def chunks_of(*arrays):
        blocks = list_blocks(*arrays, num_blocks)
        chunks = [blocks.chunk(jnp.int32(start), 3, BLOCK_TABLES.shape[1]) for start in (0, 3)]
        return chunks, blocks.num_entries

    found = []
    chunks, num_entries = chunks_of(BLOCK_TABLES, FIRST_NEEDED, NUM_NEEDED)
    for chunk in chunks:
        for req_idx, logical_block, is_real in zip(*(x.tolist() for x in chunk), strict=True):
            if is_real:
                found.append((int(BLOCK_TABLES[req_idx, logical_block]), req_idx, logical_block))
            assert 0 <= req_idx < 3
            assert 0 <= logical_block < 3
    assert int(num_entries) == len(found)
    return found


def test_blocks_are_read_in_the_order_of_memory():
    assert entries(num_blocks=10) == [(0, 2, 2), (4, 0, 1), (6, 2, 1), (9, 0, 0)]


def test_a_pool_too_large_to_sort_exactly_loses_no_block():
    # 9 entries leave room for 2^32 / 9 - 1 places: five neighbours share one, in table order.
    assert entries(num_blocks=2**31 - 1) == [(4, 0, 1), (0, 2, 2), (9, 0, 0), (6, 2, 1)]


def test_more_entries_than_are_sorted_come_in_the_order_of_the_tables(monkeypatch):
    monkeypatch.setattr(xla_block_list, "MAX_SORTED_ENTRIES", 8)
    assert entries(num_blocks=10) == [(9, 0, 0), (4, 0, 1), (6, 2, 1), (0, 2, 2)]


@pytest.mark.parametrize(
    "name",
    marked_sizes(["decode_mha", "everything_float32"], slow=["many_tiles_and_chunks"]),
)
def test_the_order_of_the_tables_gives_the_same_attention(name, attend, monkeypatch):
    monkeypatch.setattr(xla_block_list, "MAX_SORTED_ENTRIES", 0)

    # A function of its own: `attend` must not take the program that was made with the sort.
    def without_sort(*arrays, **options):
        return paged_attention_xla(*arrays, **options)

    inputs = build_inputs(next(case for case in CASES if case.name == name))
    got = attend(inputs, without_sort)
    for got_array, wanted in zip(got, dense_attention(inputs), strict=True):
        np.testing.assert_allclose(got_array, wanted, atol=5e-6, rtol=5e-6)


def test_all_layers_share_one_sort():
    inputs = build_inputs(next(case for case in CASES if case.name == "decode_mha"))

    def layers(q, kv_cache, _row, *sequences):
        for row in range(2):
            q = paged_attention(*(q, kv_cache, row, *sequences), scale=1.0, implementation="xla")
        return q

    text = jax.jit(layers).lower(*inputs.arrays).compile().as_text()
    assert text.count(" sort(") == 1
