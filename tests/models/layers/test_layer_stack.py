"""Layers in one stack of experts compute as layers with kernels of their own."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.decoders.chosen_layer import choose_layer
from models.layers.experts import ExpertLinear
from models.layers.layer_stack import InStack, find_places
from models.layers.routing import Routing
from models.loading.write_stack import finish_stack, write_layer
from tests import on_device
from tests.models.layers.test_experts import make_experts
from tests.models.layers.test_experts import run as run_experts
from tests.models.plain_context import plain_context

NUM_LAYERS = 3
NUM_LINEARS = 3  # gate, up and down


def layers_apart() -> list:
    layers = [make_experts(use_bias=True) for _ in range(NUM_LAYERS)]
    rng = np.random.default_rng(1)
    for layer in layers:
        for param in params_of(layer).values():
            values_np = rng.standard_normal(param.shape).astype(np.float32)
            param.set_value(jax.device_put(values_np))
    return layers


def params_of(layer: nnx.Module) -> dict[str, nnx.Param]:
    """The parameters of all experts in a layer."""
    return {
        ".".join(map(str, (*path, leaf))): getattr(module, leaf)
        for path, module in nnx.iter_modules(layer)
        if isinstance(module, ExpertLinear)
        for leaf in module.chosen_in_place
        if getattr(module, leaf) is not None
    }


def put_in_stacks(layers: list) -> None:
    """Moves the parameters of all experts in the layers into stacks."""
    params = {
        f"layers.{idx}.{name}": param
        for idx, layer in enumerate(layers)
        for name, param in params_of(layer).items()
    }
    values = {name: param.get_value() for name, param in params.items()}
    places = find_places(
        {name: jax.ShapeDtypeStruct(v.shape, jnp.float32) for name, v in values.items()}
    )
    assert places.keys() == values.keys()
    stacks = {}
    for name, place in places.items():
        stacks[place.stack] = write_layer(stacks.get(place.stack), values[name], place)
    for name, place in places.items():
        in_stack = InStack(
            stack=finish_stack(stacks[place.stack]),
            layer_idx=np.int32(place.layer_idx),
            num_layers=place.num_layers,
        )
        params[name].set_value(in_stack)


def test_layers_in_a_stack_compute_as_layers_apart():
    """In turn, and where a loop chooses one of them."""
    layers, context = layers_apart(), plain_context(7)
    rng = np.random.default_rng(0)
    x = on_device.array(rng.standard_normal((7, layers[0].gate_proj.kernel.shape[1])), jnp.float32)
    routing = Routing(
        on_device.array(rng.integers(0, 4, (7, 2)), jnp.int32),
        on_device.array(rng.uniform(0.1, 1, (7, 2)), jnp.float32),
    )

    def run_all(x: jax.Array, routing: Routing) -> list[jax.Array]:
        return [layer(x, routing, context) for layer in layers]

    def run_chosen(idx: jax.Array, x: jax.Array, routing: Routing) -> jax.Array:
        return choose_layer(layers, idx)(x, routing, context)

    wanted = [np.asarray(output) for output in jax.jit(run_all)(x, routing)]
    assert len({output.tobytes() for output in wanted}) == NUM_LAYERS
    put_in_stacks(layers)
    # A new function, because JAX would reuse the trace of `run_all` with the layers apart.
    in_turn = jax.jit(lambda *arrays: run_all(*arrays))(x, routing)
    chosen = jax.jit(run_chosen)
    in_loop = [chosen(np.int32(idx), x, routing) for idx in range(NUM_LAYERS)]
    for got in (in_turn, in_loop):
        for output, of_layer in zip(wanted, got, strict=True):
            np.testing.assert_array_equal(of_layer, output)


def test_program_has_each_product_once():
    """A switch would contain the product of every layer."""
    layers, context = layers_apart(), plain_context(7)
    x = on_device.zeros((7, layers[0].gate_proj.kernel.shape[1]))
    put_in_stacks(layers)
    routing = Routing(on_device.zeros((7, 2), jnp.int32), on_device.ones((7, 2)))

    def products(num_layers: int) -> int:
        def run(idx, x):
            return run_experts(choose_layer(layers[:num_layers], idx), x, routing, context)

        return jax.jit(run).lower(jnp.int32(0), x).as_text().count("call @grouped_matmul_xla")

    assert products(NUM_LAYERS) == products(2) == NUM_LINEARS
