"""Tests of `grouped_matmul/group_tiles.py`: every routed row has a place in a tile of its group."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.group_tiles import (
    choose_tile_rows,
    make_group_tiles,
    num_tiles_of,
)
from pallas_kernels.target import Target

jitted = jax.jit(make_group_tiles, static_argnames=("num_groups", "tile_rows"))


def tiles_of(group_ids, num_groups, tile_rows):
    tiles = jitted(np.asarray(group_ids, np.int32), num_groups=num_groups, tile_rows=tile_rows)
    return [np.asarray(array) for array in tiles]


def test_by_hand():
    rows, places, groups, tile_sizes = tiles_of([2, 0, 2, 2, 1], 2, 2)
    assert groups.tolist() == [0, 1, 2]
    assert places.tolist() == [6, 0, 6, 6, 2]
    assert tile_sizes.tolist() == [1, 1, 0]
    assert (rows[0], rows[2]) == (1, 4)


@given(data=st.data())
def test_every_routed_row_has_one_place_in_a_tile_of_its_group(data):
    # Few shapes, so that few programs are compiled.
    shapes = [(1, 2, 17), (4, 1, 17), (4, 4, 17), (4, 2, 1)]
    num_groups, tile_rows, num_rows = data.draw(st.sampled_from(shapes))
    group_ids = data.draw(
        st.lists(st.integers(0, num_groups), min_size=num_rows, max_size=num_rows)
    )
    rows, places, groups, tile_sizes = tiles_of(group_ids, num_groups, tile_rows)
    num_tiles = num_tiles_of(num_rows, num_groups, tile_rows)
    assert (len(rows), len(groups)) == (num_tiles * tile_rows, num_tiles)
    routed = [row for row in range(num_rows) if group_ids[row] < num_groups]
    assert len({places[row] for row in routed}) == len(routed)
    for row in routed:
        assert rows[places[row]] == row
        assert groups[places[row] // tile_rows] == group_ids[row]
    assert all(places[row] == len(rows) for row in set(range(num_rows)) - set(routed))
    # Any row may stand at an empty place, but no place is outside of the rows.
    assert ((0 <= rows) & (rows < num_rows)).all()
    sizes = np.bincount(group_ids, minlength=num_groups)[:num_groups]
    num_used = int(sum(-(-size // tile_rows) for size in sizes))
    assert (groups < num_groups).tolist() == [tile < num_used for tile in range(num_tiles)]
    assert (np.diff(groups) >= 0).all()
    held = np.bincount([places[row] // tile_rows for row in routed], minlength=num_tiles)
    assert tile_sizes.tolist() == held.tolist()
    assert all(places[row] % tile_rows < tile_sizes[places[row] // tile_rows] for row in routed)


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "tile_rows", "wanted"),
    [(1, 8, 8, 1), (8, 8, 8, 8), (64, 8, 8, 15), (17, 2, 8, 3), (5, 1, 1, 5)],
)
def test_there_are_tiles_for_the_worst_case_and_no_more(num_rows, num_groups, tile_rows, wanted):
    assert num_tiles_of(num_rows, num_groups, tile_rows) == wanted
    # All groups but the last have one row, so that each has a tile with one row.
    worst = [min(row, num_groups - 1) for row in range(num_rows)]
    _, _, groups, _ = tiles_of(worst, num_groups, tile_rows)
    num_used = int((groups < num_groups).sum())
    assert wanted - 1 <= num_used <= wanted


def test_tiles_grow_with_the_rows_of_a_group():
    cpu, gpu = Target(platform="cpu"), Target(platform="gpu", compute_capability="9.0")
    sizes = {
        target.platform: [choose_tile_rows(rows, 64, target) for rows in (8, 64, 1024, 2048, 8192)]
        for target in (cpu, gpu)
    }
    assert sizes == {"cpu": [1, 8, 8, 16, 16], "gpu": [8, 8, 16, 64, 128]}
