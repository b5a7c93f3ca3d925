"""Errors are found: NaN, one wrong row, one wrong bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ops.findings import close_findings, relative_error, same_finding


def test_error_is_relative_in_the_norm() -> None:
    assert relative_error(np.array([3.0, 4.4]), np.array([3.0, 4.0])) == pytest.approx(0.4 / 5)
    assert relative_error(np.array([0.0, 2.0]), np.zeros(2)) == 2.0
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(np.zeros(3), np.zeros(4))


def test_one_wrong_row_among_many_is_found() -> None:
    wanted = np.random.default_rng(0).standard_normal((20_000, 4))
    assert all(f.is_right for f in close_findings("out", wanted * 1.001, wanted, 1e-2))
    got = wanted.copy()
    got[17] = -got[17]
    whole, worst_row = close_findings("out", got, wanted, 3e-2)
    assert whole.is_right and not worst_row.is_right
    got[17, 0] = np.nan
    assert not any(f.is_right for f in close_findings("out", got, wanted, 3e-2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_exact_results_differ_by_single_entries(dtype: str) -> None:
    wanted = np.arange(6, dtype=np.float32).astype(jnp.dtype(dtype)).reshape(2, 3)
    if dtype != "int8":
        wanted[0, 1] = np.nan
    got = wanted.copy()
    assert same_finding("x", got, wanted).is_right
    got[1, 2] = 0
    assert same_finding("x", got, wanted).error == 1
