"""A layer that stands for several computes with the parameters of the one that is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoders.chosen_layer import choose_layer
from models.errors import ModelError
from models.layers.linear import Linear
from models.layers.rms_norm import RMSNorm
from models.stored_kernels.column_panels import PanelKernel
from models.stored_kernels.rounded_int8 import RoundedInt8Kernel
from tests import on_device
from tests.models.plain_context import plain_context

NUM_LAYERS = 3


class TwoLinears(nnx.Module):
    """A layer with a norm, a bias, and kernels in a place of their own."""

    def __init__(self) -> None:
        self.norm = RMSNorm(8, eps=1e-6, dtype=jnp.float32)
        self.first = Linear(8, 6, use_bias=True, dtype=jnp.float32)
        self.second = Linear(6, 4, use_bias=False, dtype=jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        context = plain_context(x.shape[0])
        return self.second(self.first(self.norm(x), context), context)


def random_layers() -> list[TwoLinears]:
    """Every parameter of every layer has random numbers of its own."""
    rng = np.random.default_rng(0)
    layers = [TwoLinears() for _ in range(NUM_LAYERS)]
    for layer in layers:
        for _, param in nnx.iter_graph(layer):
            if isinstance(param, nnx.Param):
                param.set_value(jax.device_put(rng.standard_normal(param.shape).astype(np.float32)))
    return layers


def in_panels(layers: list[TwoLinears]) -> None:
    for layer in layers:
        panels = jnp.split(layer.first.kernel[...], [4], axis=1)
        layer.first.kernel.set_value(PanelKernel(tuple(panels)))


def in_bfloat16(layers: list[TwoLinears]) -> None:
    for layer in layers:
        layer.second.kernel.set_value(layer.second.kernel[...].astype(jnp.bfloat16))


def in_int8(layers: list[TwoLinears]) -> None:
    for layer in layers:
        layer.first.kernel.set_value(RoundedInt8Kernel.of(layer.first.kernel[...]))


@pytest.mark.parametrize("change", [lambda layers: None, in_panels, in_bfloat16, in_int8])
def test_chosen_layer_computes_as_that_layer(change):
    layers = random_layers()
    change(layers)
    x = on_device.array(np.random.default_rng(2).standard_normal((5, 8)), jnp.float32)
    run = jax.jit(lambda layer_idx, x: choose_layer(layers, layer_idx)(x))
    outputs = jax.jit(lambda x: [layer(x) for layer in layers])(x)
    assert len({output.tobytes() for output in map(np.asarray, outputs)}) == NUM_LAYERS
    for layer_idx, wanted in enumerate(outputs):
        np.testing.assert_allclose(run(layer_idx, x), wanted, rtol=1e-4, atol=1e-5)


def test_the_only_layer_is_itself():
    (layer, *_) = random_layers()
    assert choose_layer([layer], jnp.int32(0)) is layer


def test_layers_with_different_parameters_are_refused():
    layers = random_layers()
    layers[1].first.bias = None
    with pytest.raises(ModelError, match="different parameters"):
        choose_layer(layers, jnp.int32(0))


def test_layers_keep_their_own_parameters():
    layers = random_layers()
    before = [jax.tree.leaves(nnx.state(layer)) for layer in layers]
    x = on_device.ones((2, 8))
    jax.jit(lambda layer_idx, x: choose_layer(layers, layer_idx)(x))(1, x)
    for layer, arrays in zip(layers, before, strict=True):
        after = jax.tree.leaves(nnx.state(layer))
        assert [id(array) for array in after] == [id(array) for array in arrays]
