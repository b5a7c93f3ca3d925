"""Tests of `kv_scatter/pallas_portable.py` against the reference, and of what it must not touch."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_layout import pad_slot
from pallas_kernels.kv_scatter.cases import CASES, build_inputs
from pallas_kernels.kv_scatter.pallas_portable import kv_scatter_pallas
from pallas_kernels.kv_scatter.reference import kv_scatter_reference


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, run_jitted):
    inputs = build_inputs(case)
    # The row is traced here.
    arguments = (inputs.k_cache, inputs.v_cache, inputs.k, inputs.v, inputs.slots, inputs.row)
    got = run_jitted(kv_scatter_pallas, *arguments)
    wanted = run_jitted(kv_scatter_reference, *arguments)
    for got_cache, wanted_cache in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got_cache), np.asarray(wanted_cache))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_padding_writes_nowhere(row):
    # Past one row would be the next row, and a negative index would be the last element.
    cache = jnp.zeros((3, 4, 2, 8, 16))
    padding = pad_slot(3, 4, 8)
    slots = jnp.array([padding, padding + 1, 2 * padding, jnp.iinfo(jnp.int32).max], jnp.int32)
    token = jnp.ones((4, 2, 16))
    k_cache, v_cache = kv_scatter_pallas(cache, cache, token, token, slots, row)
    assert not k_cache.any()
    assert not v_cache.any()
