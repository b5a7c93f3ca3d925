"""Rows summed by halves: as near to NumPy's sums as float32 allows."""

import numpy as np
import pytest

from pallas_kernels.row_reductions import sum_of_rows
from tests.quick_compile import quick_jit

# Powers of two are halved to the end, odd numbers not at all, 24 and 80 in part.
NUM_COLUMNS = (1, 2, 7, 8, 16, 24, 64, 80, 129, 512)


@pytest.mark.parametrize("num_columns", NUM_COLUMNS)
def test_every_column_counts_once(num_columns: int):
    # Powers of two add up exactly in any order: a column left out or added twice shows.
    powers = np.broadcast_to(2.0 ** (np.arange(num_columns) % 16), (2, num_columns))
    sums = quick_jit(sum_of_rows)(powers.astype(np.float32))
    np.testing.assert_array_equal(sums, powers.sum(-1))


def test_no_row_leaks_into_another_and_nan_stays():
    x = np.zeros((4, 64), np.float32)
    x[1, 40] = np.nan
    x[2, 63] = -np.inf
    sums = np.asarray(quick_jit(sum_of_rows)(x))
    assert np.isnan(sums[1]) and sums[2] == -np.inf and sums[0] == sums[3] == 0
