"""Products of heads with matrices of their own."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoders.chosen_layer import choose_layer, kind_of
from models.layers.head_linear import HeadLinear
from models.layers.linear import name_linears
from tests import on_device
from tests.models.plain_context import plain_context

NUM_ROWS, NUM_HEADS, IN, OUT = 4, 3, 5, 2


def make_linear(seed: int = 0, dtype: str = "float32") -> HeadLinear:
    linear = HeadLinear(NUM_HEADS, IN, OUT, dtype=jnp.dtype(dtype))
    kernel = np.random.default_rng(seed).normal(size=(NUM_HEADS, IN, OUT))
    linear.kernel[...] = on_device.array(kernel, dtype)
    return linear


def draw_x(dtype: str = "float32") -> jnp.ndarray:
    x = np.random.default_rng(9).normal(size=(NUM_ROWS, NUM_HEADS, IN))
    return on_device.array(x, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_each_head_is_multiplied_by_its_own_matrix(dtype, tolerance):
    linear, x = make_linear(dtype=dtype), draw_x(dtype)
    y = linear(x, plain_context(NUM_ROWS))
    x_np, kernel_np = (np.asarray(a).astype(np.float64) for a in (x, linear.kernel[...]))
    wanted = np.stack([x_np[:, h] @ kernel_np[h] for h in range(NUM_HEADS)], axis=1)
    np.testing.assert_allclose(y.astype(jnp.float32), wanted, rtol=tolerance, atol=tolerance)
    assert (y.shape, y.dtype) == ((NUM_ROWS, NUM_HEADS, OUT), x.dtype)


def test_16_bit_products_of_usual_sizes_run():
    # XLA:CPU has no 16-bit product in some orders of the axes, but computes small ones itself.
    linear = HeadLinear(8, 16, 32, dtype=jnp.bfloat16)
    linear.kernel[...] = on_device.ones((8, 16, 32), jnp.bfloat16)
    y = linear(on_device.ones((4, 8, 16), jnp.bfloat16), plain_context(4))
    np.testing.assert_array_equal(y.astype(jnp.float32), np.full((4, 8, 32), 16))


def test_layers_of_a_loop_use_the_matrices_of_the_layer_that_it_has_reached():
    linears = [make_linear(seed) for seed in (1, 2)]
    assert kind_of(linears[0]) == kind_of(linears[1])
    context = plain_context(NUM_ROWS)
    for layer_idx, linear in enumerate(linears):
        chosen = choose_layer(linears, jnp.int32(layer_idx))
        np.testing.assert_allclose(
            chosen(draw_x(), context), linear(draw_x(), context), rtol=1e-6, atol=1e-6
        )


def test_a_feature_can_change_the_output():
    linear = make_linear()
    linear.name = "self_attn.k_up"

    def change(name, x, y, context):
        assert (name, x.shape) == ("self_attn.k_up", (NUM_ROWS, NUM_HEADS * IN))
        return y + x[:, : NUM_HEADS * OUT]

    context = plain_context(NUM_ROWS)
    changed = linear(draw_x(), dataclasses.replace(context, linear_changes=(change,)))
    added = draw_x().reshape(NUM_ROWS, -1)[:, : NUM_HEADS * OUT].reshape(changed.shape)
    np.testing.assert_allclose(changed, linear(draw_x(), context) + added, rtol=1e-5, atol=1e-6)


def test_the_loader_names_it_as_it_names_linears():
    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.k_up = make_linear()

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Layer()])

    model = Model()
    name_linears(model)
    assert model.layers[0].k_up.name == "k_up"
