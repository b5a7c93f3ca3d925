"""Rows reduced by halves: the maxima are NumPy's, the sums as near as float32 allows."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.random import default_rng

from pallas_kernels.row_reductions import max_of_rows, sum_of_rows

# Powers of two are halved to the end, odd numbers not at all, 24 and 80 in part.
NUM_COLUMNS = (1, 2, 7, 8, 16, 24, 64, 80, 129, 512)


@pytest.mark.parametrize("num_columns", NUM_COLUMNS)
def test_every_column_counts_once(num_columns: int):
    x = default_rng(0).standard_normal((3, 5, num_columns)).astype(np.float32)
    np.testing.assert_array_equal(max_of_rows(jnp.asarray(x)), x.max(axis=-1))
    # Powers of two add up exactly in any order: a column left out or added twice shows.
    powers = np.broadcast_to(2.0 ** (np.arange(num_columns) % 16), (2, num_columns))
    np.testing.assert_array_equal(sum_of_rows(jnp.asarray(powers, jnp.float32)), powers.sum(-1))


def test_no_row_leaks_into_another_and_nan_stays():
    x = np.zeros((4, 64), np.float32)
    x[1, 40] = np.nan
    x[2, 63] = -np.inf
    assert np.isnan(np.asarray(max_of_rows(jnp.asarray(x)))).tolist() == [False, True, False, False]
    sums = np.asarray(sum_of_rows(jnp.asarray(x)))
    assert np.isnan(sums[1]) and sums[2] == -np.inf and sums[0] == sums[3] == 0
