"""Tests of `argument_checks.py`."""

import jax.numpy as jnp
import pytest

from pallas_kernels.argument_checks import (
    require_at_least,
    require_float,
    require_int32,
    require_scalar,
    require_shape,
)


def test_a_named_dimension_takes_any_size():
    require_shape("op", "x", jnp.zeros((3, 5)), ("num_tokens", 5))


@pytest.mark.parametrize("shape", [(3, 4), (3,), (3, 5, 1)])
def test_a_wrong_size_or_rank_is_refused(shape):
    with pytest.raises(ValueError, match=r"op: x has the wrong shape: got .*, wanted \[n, 5\]"):
        require_shape("op", "x", jnp.zeros(shape), ("n", 5))


def test_dtypes_are_checked_by_name():
    require_int32("op", x=jnp.zeros(1, jnp.int32))
    require_float("op", x=jnp.zeros(1, jnp.bfloat16))
    with pytest.raises(ValueError, match="y has the wrong dtype: got float32, wanted int32"):
        require_int32("op", x=jnp.zeros(1, jnp.int32), y=jnp.zeros(1))
    with pytest.raises(ValueError, match="x has the wrong dtype: got int32, wanted a float"):
        require_float("op", x=jnp.zeros(1, jnp.int32))


def test_a_scalar_is_one_integer():
    require_scalar("op", "row", jnp.int32(1))
    with pytest.raises(ValueError, match=r"row must be one integer: got int32\[2\]"):
        require_scalar("op", "row", jnp.zeros(2, jnp.int32))
    # Row 2 of a cache of 200 blocks begins at block 400, which uint8 would make 144.
    with pytest.raises(ValueError, match=r"row must be one integer: got uint8\[\], wanted int32"):
        require_scalar("op", "row", jnp.uint8(2))


def test_a_value_below_the_minimum_is_refused():
    require_at_least("op", "size", 1, 1)
    with pytest.raises(ValueError, match="size is too small: got 0, wanted at least 1"):
        require_at_least("op", "size", 0, 1)
