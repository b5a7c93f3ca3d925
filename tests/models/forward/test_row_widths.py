"""Work is done for the least width that holds the rows in use, and for no other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.forward.row_widths import run_at_width
from tests import on_device
from tests.compiler_flags import AS_FOR_USERS

WIDTHS = (2, 3, 8)


def test_least_width_that_holds_the_used_rows_is_chosen():
    rows = np.arange(16.0, dtype=np.float32).reshape(8, 2)

    def double(width, carry):
        doubled, num_rows = carry
        return width.write(doubled, 2 * width.read(on_device.array(rows))), num_rows + width.size

    run = jax.jit(lambda used: run_at_width(WIDTHS, used, double, (on_device.zeros((8, 2)), 0)))
    for num_used in range(9):
        doubled, num_rows = map(np.asarray, run(np.int32(num_used)))
        expected = next(width for width in WIDTHS if num_used <= width)
        assert num_rows == expected
        np.testing.assert_array_equal(doubled[:expected], 2 * rows[:expected])
        assert not doubled[expected:].any()


def test_one_width_needs_no_loop():
    def double(width, rows):
        return width.write(rows, 2 * width.read(rows))

    jaxpr = jax.make_jaxpr(lambda rows, used: run_at_width((4,), used, double, rows))
    assert "while" not in str(jaxpr(on_device.ones((4, 2)), jnp.int32(1)))


def test_compiler_does_not_do_the_work_of_every_width_beforehand():
    """What is multiplied comes from outside of the loops, and does not change in them."""

    def project(rows, weights, used):
        def run(width, out):
            return width.write(out, width.read(rows) @ weights)

        return run_at_width(WIDTHS, used, run, on_device.zeros((8, 32)))

    shapes = (on_device.zeros((8, 16)), on_device.zeros((16, 32)), jnp.int32(1))
    text = jax.jit(project).lower(*shapes).compile(AS_FOR_USERS).as_text()
    entry = re.search(r"^ENTRY .*?^}", text, re.MULTILINE | re.DOTALL)[0]
    assert "dot_general" in text and "while" in entry
    assert "dot_general" not in entry


@pytest.mark.parametrize("widths", [WIDTHS, (8,)])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_rows_stay_as_they_are_where_the_work_is_not_wanted(widths, is_wanted):
    rows = on_device.arange(16, dtype=np.float32).reshape(8, 2)

    def double(width, rows):
        return width.write(rows, 2 * width.read(rows))

    run = jax.jit(
        lambda rows, used, is_wanted: run_at_width(widths, used, double, rows, is_wanted=is_wanted)
    )
    doubled = run(rows, jnp.int32(3), is_wanted)
    if is_wanted:
        np.testing.assert_array_equal(doubled[:3], 2 * rows[:3])
    else:
        np.testing.assert_array_equal(doubled, rows)
