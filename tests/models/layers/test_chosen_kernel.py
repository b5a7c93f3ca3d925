"""Products by kernels of which a layer index chooses are those by that layer's kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.chosen_kernel import ChosenKernel, multiply_each


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def product_of_panels(x: jax.Array, panels: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [x @ panel for panel in panels]


def negative_product(x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
    return [-x @ kernel]


@pytest.mark.parametrize("layer_idx", range(3))
def test_each_product_is_by_the_kernel_of_the_layer(layer_idx):
    x, y = random_array(2, 4), random_array(5, 3, seed=1)
    split = [(random_array(4, 2, seed=10 + idx), random_array(4, 1)) for idx in range(3)]
    whole = [random_array(3, 6, seed=20 + idx) for idx in range(3)]

    @jax.jit
    def multiply(layer_idx, x, y, split, whole):
        kernels = [ChosenKernel(layer_idx=layer_idx, kernels=tuple(k)) for k in (split, whole)]
        return multiply_each([product_of_panels, negative_product], [x, y], kernels)

    (left, right), (other,) = multiply(layer_idx, x, y, split, whole)
    np.testing.assert_allclose(left, x @ split[layer_idx][0], rtol=1e-6)
    np.testing.assert_allclose(right, x @ split[layer_idx][1], rtol=1e-6)
    np.testing.assert_allclose(other, -y @ whole[layer_idx], rtol=1e-6)


def test_products_of_a_layer_share_a_switch_and_own_kernels_need_none():
    x, kernels = random_array(2, 4), tuple(random_array(4, 4, seed=idx) for idx in range(2))

    def chosen(layer_idx, x):
        choice = ChosenKernel(layer_idx=layer_idx, kernels=kernels)
        return multiply_each([negative_product] * 3, [x] * 3, [choice] * 3)

    def own(x):
        return multiply_each([negative_product] * 3, [x] * 3, [kernels[0]] * 3)

    assert str(jax.make_jaxpr(chosen)(1, x)).count("cond[") == 1
    assert "cond[" not in str(jax.make_jaxpr(own)(x))
