"""A kernel chosen by a layer index computes the products of that layer's kernel."""

import jax
import numpy as np
import pytest

from models.layers.chosen_kernel import ChosenKernel, with_kernel


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def negative_product(x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
    return [-x @ kernel]


def multiply(layer_idx: jax.Array | int, x: jax.Array, kernels: tuple[jax.Array, ...]) -> jax.Array:
    (out,) = with_kernel(negative_product, x, ChosenKernel(layer_idx=layer_idx, kernels=kernels))
    return out


@pytest.mark.parametrize("layer_idx", range(3))
def test_product_is_by_the_kernel_of_the_layer(layer_idx):
    x, kernels = random_array(5, 3), tuple(random_array(3, 6, seed=20 + idx) for idx in range(3))
    found = jax.jit(multiply)(layer_idx, x, kernels)
    np.testing.assert_allclose(found, -x @ kernels[layer_idx], rtol=1e-6)


def test_only_chosen_kernels_need_a_switch():
    x, kernels = random_array(2, 4), tuple(random_array(4, 4, seed=idx) for idx in range(2))
    assert str(jax.make_jaxpr(multiply)(1, x, kernels)).count("cond[") == 1
    own = jax.make_jaxpr(lambda x: with_kernel(negative_product, x, kernels[0]))(x)
    assert "cond[" not in str(own)
