"""Tests of `grouped_matmul/xla.py`: against the definition, and the bits of a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.platforms import CPU
from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.cases import build_inputs
from pallas_kernels.grouped_matmul.group_tiles import make_group_tiles
from pallas_kernels.grouped_matmul.xla import grouped_matmul_xla
from tests.pallas_kernels.grouped_matmul.products import MARKED_CASES, assert_is_the_product


@pytest.mark.parametrize("case", MARKED_CASES)
def test_rows_are_multiplied_with_the_matrix_of_their_group(case, run_jitted):
    inputs = build_inputs(case)
    multiply = functools.partial(grouped_matmul_xla, **inputs.options)
    assert_is_the_product(case, inputs, run_jitted(multiply, *inputs.arrays))


def test_other_devices_multiply_with_a_slice(run_jitted):
    # What `platform_dependent` leaves out on a CPU.
    rng = np.random.default_rng(0)
    tile, weights = rng.standard_normal((4, 8)), rng.standard_normal((3, 8, 6))
    args = (jnp.float32(tile), jnp.float32(weights), jnp.int32(2), jnp.int32(4))
    multiply = functools.partial(xla._multiply, weights_dtype=None)
    np.testing.assert_allclose(run_jitted(multiply, *args), tile @ weights[2], rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_with_any_other_rows(run_jitted):
    # One row of a group, and then two and nine of it: in a tile of few rows, and in a full one.
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((17, 64)).astype(np.float32)
    weights = rng.standard_normal((3, 64, 24)).astype(np.float32)
    # As users compile it: the optimizer decides how a product and a sum are rounded.
    options = CPU.of_this_machine().compiler_options({"float32"}, batch_invariant=True)
    multiply = jax.jit(
        functools.partial(grouped_matmul_xla, weights_dtype=None), compiler_options=options
    )
    results = []
    for num_others in (0, 1, 8):
        group_ids = np.full(17, 3, np.int32)  # no group
        group_ids[16 - num_others :] = 1
        tiles = run_jitted(make_group_tiles, jnp.asarray(group_ids), num_groups=3, tile_rows=8)
        out = multiply(rows[tiles.rows], weights, tiles.groups, tiles.sizes)
        results.append(np.asarray(out)[tiles.places[16]])
    np.testing.assert_allclose(results[0], rows[16] @ weights[1], rtol=1e-5, atol=1e-5)
    assert all((result == results[0]).all() for result in results)
