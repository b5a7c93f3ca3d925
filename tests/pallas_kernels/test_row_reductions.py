"""Rows reduced by halves: the maxima are NumPy's, the sums as near as float32 allows."""

import numpy as np
import pytest
from numpy.random import default_rng

from pallas_kernels.row_reductions import max_of_rows, sum_of_rows
from tests.quick_compile import quick_jit

# Powers of two are halved to the end, odd numbers not at all, 24 and 80 in part.
NUM_COLUMNS = (1, 2, 7, 8, 16, 24, 64, 80, 129, 512)


def maxima_and_sums(x, y):
    return max_of_rows(x), sum_of_rows(y)


@pytest.mark.parametrize("num_columns", NUM_COLUMNS)
def test_every_column_counts_once(num_columns: int):
    x = default_rng(0).standard_normal((3, 5, num_columns)).astype(np.float32)
    # Powers of two add up exactly in any order: a column left out or added twice shows.
    powers = np.broadcast_to(2.0 ** (np.arange(num_columns) % 16), (2, num_columns))
    maxima, sums = quick_jit(maxima_and_sums)(x, powers.astype(np.float32))
    np.testing.assert_array_equal(maxima, x.max(axis=-1))
    np.testing.assert_array_equal(sums, powers.sum(-1))


def test_no_row_leaks_into_another_and_nan_stays():
    x = np.zeros((4, 64), np.float32)
    x[1, 40] = np.nan
    x[2, 63] = -np.inf
    maxima, sums = map(np.asarray, quick_jit(maxima_and_sums)(x, x))
    assert np.isnan(maxima).tolist() == [False, True, False, False]
    assert np.isnan(sums[1]) and sums[2] == -np.inf and sums[0] == sums[3] == 0
