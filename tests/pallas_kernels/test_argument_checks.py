"""Tests of `argument_checks.py`."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.argument_checks import (
    require_at_least,
    require_finite,
    require_float,
    require_int32,
    require_not_empty,
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
    # JAX promotes no float of 8 bits, so a product with one would fail.
    with pytest.raises(ValueError, match="got float8_e5m2, wanted a float of 16 bits or more"):
        require_float("op", x=jnp.zeros(1, jnp.float8_e5m2))


@pytest.mark.parametrize("value", [None, 1.5, [[0, 1]]], ids=str)
def test_what_is_no_array_is_refused(value):
    with pytest.raises(ValueError, match="op: x must be an array: got .* of "):
        require_shape("op", "x", value, ("n",))
    with pytest.raises(ValueError, match="op: x must be an array: got .* of "):
        require_scalar("op", "x", value)


def test_an_array_without_elements_is_refused():
    require_not_empty("op", "x", jnp.zeros((2, 1)))
    with pytest.raises(ValueError, match=r"op: x is empty: got \[2, 0\], wanted no axis of size 0"):
        require_not_empty("op", "x", jnp.zeros((2, 0)))


def test_a_scalar_is_one_integer():
    require_scalar("op", "row", jnp.int32(1))
    with pytest.raises(ValueError, match=r"row must be one integer: got int32\[2\]"):
        require_scalar("op", "row", jnp.zeros(2, jnp.int32))
    # Row 2 of a cache of 200 blocks begins at block 400, which uint8 would make 144.
    with pytest.raises(ValueError, match=r"row must be one integer: got uint8\[\], wanted int32"):
        require_scalar("op", "row", jnp.uint8(2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "size is too small: got 0, wanted at least 1"),
        (2**31, "size is too large: got 2147483648, wanted at most 2147483647"),
        (2.0, "size must be an integer: got 2.0, wanted at least 1"),
        ("2", "size must be an integer: got '2'"),
    ],
)
def test_a_static_size_is_an_integer_in_range(value, message):
    for size in (1, 2**31 - 1, np.int64(7)):
        require_at_least("op", "size", size, 1)
    with pytest.raises(ValueError, match=message):
        require_at_least("op", "size", value, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
def test_a_factor_is_a_finite_number(value):
    for factor in (0, -1.5, np.float32(0.5)):
        require_finite("op", "scale", factor)
    with pytest.raises(ValueError, match=f"scale must be a finite number: got {value!r}"):
        require_finite("op", "scale", value)
