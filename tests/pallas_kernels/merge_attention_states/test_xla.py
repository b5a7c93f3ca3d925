"""Tests of `merge_attention_states/xla.py`: against its definition, and its algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.merge_attention_states.cases import CASES, build_inputs
from pallas_kernels.merge_attention_states.xla import merge_attention_states_xla
from tests import on_device
from tests.pallas_kernels.merge_attention_states.test_reference import merge_by_definition
from tests.quick_compile import quick_jit

TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}

merge = quick_jit(merge_attention_states_xla)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_its_definition(case, run_jitted):
    arrays = build_inputs(case).arrays
    out, lse = run_jitted(merge_attention_states_xla, *arrays)
    expected_out, expected_lse = merge_by_definition(
        *(np.asarray(array).astype(np.float64) for array in arrays)
    )
    assert out.dtype == case.dtype
    tolerance = TOLERANCES[case.dtype]
    out = np.asarray(out).astype(np.float64)
    np.testing.assert_allclose(out, expected_out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6, rtol=2e-6)


def attention(logits, values):
    """Softmax attention in float64: output [1, 1, 2] and lse [1, 1] as float32."""
    if len(logits) == 0:
        return np.full((1, 1, 2), np.nan, np.float32), np.full((1, 1), -np.inf, np.float32)
    weights = np.exp(logits - logits.max())
    out = weights @ values / weights.sum()
    lse = logits.max() + np.log(weights.sum())
    return out[None, None].astype(np.float32), np.full((1, 1), lse, np.float32)


@given(
    parts=st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 1000),
)
def test_attention_over_parts_merges_into_attention_over_all(parts, spread, seed):
    rng = np.random.default_rng(seed)
    logits = spread * rng.standard_normal(sum(parts))
    values = rng.standard_normal((sum(parts), 2))
    ends = np.cumsum(parts)[:-1]
    a, b, c = (
        attention(*part)
        for part in zip(np.split(logits, ends), np.split(values, ends), strict=True)
    )
    expected = attention(logits, values)
    orders = (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), merge(*c, *merge(*b, *a)))
    for got in orders:
        for got_array, wanted in zip(got, expected, strict=True):
            np.testing.assert_allclose(got_array, wanted, atol=5e-6, rtol=5e-6)


def test_a_state_merged_with_no_keys_is_unchanged():
    out, lse = on_device.full((1, 1, 3), 1.7), on_device.full((1, 1), -123.25)
    nothing = on_device.full((1, 1, 3), jnp.nan), on_device.full((1, 1), -jnp.inf)
    for got_out, got_lse in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        np.testing.assert_array_equal(got_out, out)
        np.testing.assert_array_equal(got_lse, lse)


def test_two_states_without_keys_make_no_nan_on_the_way():
    """Somebody may look for NaN in every operation."""
    out, lse = on_device.ones((1, 1, 3)), on_device.full((1, 1), -jnp.inf)
    with jax.debug_nans(True), jax.disable_jit():
        merged_out, merged_lse = merge_attention_states_xla(out, lse, out, lse)
    assert not merged_out.any()
    assert jnp.isneginf(merged_lse).all()
