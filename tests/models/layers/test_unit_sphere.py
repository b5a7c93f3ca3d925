"""Parts of the normalized transformer: lengths, factors and rates, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.unit_sphere import SquaredSigmoidGate, UnitFactors, UnitNorm, UnitSphereMLP
from tests import on_device
from tests.models.plain_context import plain_context

X = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)


def test_normed_rows_have_length_one():
    normed = np.asarray(UnitNorm()(on_device.array(X)))
    np.testing.assert_allclose(np.linalg.norm(normed, axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(normed, X / np.linalg.norm(X, axis=-1, keepdims=True), rtol=1e-5)


def test_rows_of_zeros_stay_zeros():
    assert not np.asarray(UnitNorm()(on_device.zeros((2, 4), jnp.bfloat16))).any()


def test_factors_are_stored_as_multiples_of_their_unit():
    factors = UnitFactors(2, unit=4.0, axis="heads", dtype=jnp.bfloat16)
    factors.stored.set_value(on_device.array([0.5, -0.25], jnp.bfloat16))
    assert factors(on_device.ones((1, 2))).tolist() == [[2.0, -1.0]]
    rule = factors.weight_rules("model.layers.0.mlp.suv_up")["stored"]
    assert [source.name for source in rule.sources] == ["model.layers.0.mlp.suv_up"]
    assert rule.axes == ("heads",)


def test_factors_are_rounded_to_the_dtype_of_what_they_multiply():
    factors = UnitFactors(1, unit=1 / 0.0177, dtype=jnp.bfloat16)
    factors.stored.set_value(on_device.array([0.0177], jnp.bfloat16))
    stored = float(jnp.bfloat16(0.0177))
    assert factors(on_device.ones(1)) == pytest.approx(stored / 0.0177, rel=1e-6)
    assert factors(on_device.ones(1, jnp.bfloat16)).dtype == jnp.bfloat16


def test_gate_squares_its_factors():
    gate = SquaredSigmoidGate(8, unit=2.0, dtype=jnp.float32)
    gate.stored.set_value(on_device.full(8, -1.5))
    np.testing.assert_allclose(gate(on_device.array(X)), 1 / (1 + np.exp(-9.0 * X)), rtol=1e-4)


def test_mlp_scales_both_parts_and_norms_the_inner_features():
    rng = np.random.default_rng(1)
    mlp = UnitSphereMLP(8, 6, activation="silu", dtype=jnp.float32)
    weights = {}
    for name, shape in (("gate_proj", (8, 6)), ("up_proj", (8, 6)), ("down_proj", (6, 8))):
        weights[name] = rng.standard_normal(shape).astype(np.float32)
        getattr(mlp, name).kernel.set_value(on_device.array(weights[name]))
    for name in ("suv_gate", "suv_up"):
        weights[name] = rng.uniform(0.5, 1.5, 6).astype(np.float32)
        getattr(mlp, name).stored.set_value(on_device.array(weights[name]))

    gate = X @ weights["gate_proj"] * weights["suv_gate"] * np.sqrt(8)
    inner = gate / (1 + np.exp(-gate)) * (X @ weights["up_proj"]) * weights["suv_up"] * np.sqrt(8)
    wanted = inner / np.linalg.norm(inner, axis=-1, keepdims=True) @ weights["down_proj"]
    got = mlp(on_device.array(X), plain_context(3))
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
