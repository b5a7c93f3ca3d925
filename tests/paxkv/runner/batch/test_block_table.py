"""Block tables hold a row's real blocks, and zeros after them."""

import numpy as np
import pytest

from paxkv.errors import InvariantError
from paxkv.runner.batch.block_table import BlockTable, MultiGroupBlockTable


def make_table():
    return BlockTable(max_num_seqs=3, max_blocks_per_req=4, num_blocks=10)


def test_appended_blocks_follow_the_earlier_ones():
    table = make_table()
    table.append_row(1, [7, 3])
    table.append_row(1, [])
    table.append_row(1, [9])
    assert table.block_ids_np.tolist() == [[0, 0, 0, 0], [7, 3, 9, 0], [0, 0, 0, 0]]
    assert table.num_blocks_np.tolist() == [0, 3, 0]


def test_cleared_row_is_zero_again():
    table = make_table()
    table.append_row(2, [1, 2, 3, 4])
    table.clear_row(2)
    assert not table.block_ids_np.any()
    table.append_row(2, [5])
    assert table.block_ids_np[2].tolist() == [5, 0, 0, 0]


@pytest.mark.parametrize("block_ids", [[10], [3, -1]])
def test_block_outside_the_pool_is_a_bug(block_ids):
    with pytest.raises(InvariantError, match=r"must be in \[0, 10\)"):
        make_table().append_row(0, block_ids)


def test_row_over_its_length_is_a_bug():
    table = make_table()
    table.append_row(0, [1, 2, 3])
    with pytest.raises(InvariantError, match="at most 4 blocks, got 5"):
        table.append_row(0, [4, 5])


def test_groups_keep_their_own_blocks():
    tables = MultiGroupBlockTable([make_table(), make_table()])
    tables.append_row(0, ([1, 2], [3]))
    assert [t.block_ids_np[0].tolist() for t in tables.tables] == [[1, 2, 0, 0], [3, 0, 0, 0]]
    tables.clear_row(0)
    assert not any(np.any(t.block_ids_np) for t in tables.tables)
    with pytest.raises(ValueError):
        tables.append_row(0, ([1],))


def test_appending_to_many_rows_equals_appending_to_each_row():
    many, each = (MultiGroupBlockTable([make_table(), make_table()]) for _ in range(2))
    steps = [([2, 0], [([1], [2, 3]), ([4], [5])]), ([0, 1], [([6], [7]), ([8], [9])])]
    for rows, block_ids in steps:
        many.append_rows(rows, block_ids)
        for row_idx, of_row in zip(rows, block_ids, strict=True):
            each.append_row(row_idx, of_row)
    for table, other in zip(many.tables, each.tables, strict=True):
        assert table.block_ids_np.tolist() == other.block_ids_np.tolist()
        assert table.num_blocks_np.tolist() == other.num_blocks_np.tolist()


@pytest.mark.parametrize("block_ids", [[3, 10], [-1, 3]])
def test_block_outside_the_pool_for_one_of_many_rows_is_a_bug(block_ids):
    with pytest.raises(InvariantError, match=r"must be in \[0, 10\)"):
        make_table().append_one_each([0, 1], block_ids)


def test_one_full_row_among_many_is_a_bug():
    table = make_table()
    table.append_row(1, [1, 2, 3, 4])
    with pytest.raises(InvariantError, match="at most 4 blocks"):
        table.append_one_each([0, 1], [3, 3])
