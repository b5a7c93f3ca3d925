"""Checks of recurrent layers whose heads are split over simulated devices (`split_engine`)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from models.forward.kernel_settings import PAGES_BY_DEVICE, KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.gated_delta_net import LINEAR_ATTENTION, GatedDeltaNet, GatedDeltaNetConfig
from models.layers.mamba2 import MAMBA, Mamba2, Mamba2Config
from models.weight_rule import WeightRule, rules_of_layers, split_spec
from paxkv.runner.memory.device_mesh import find_mesh
from tests.models.layers.test_advance_states import HEADS, NUM_ROWS, PAGE_WORDS, SIZES, make_context
from tests.quick_compile import QUICK_COMPILE

_MAMBA2 = functools.partial(Mamba2Config, **SIZES, **HEADS, state_size=6, eps=1e-6)
_DELTA_NET = functools.partial(
    GatedDeltaNetConfig, **SIZES, num_k_heads=2, k_dim=4, v_dim=6, eps=1e-6
)
# (name of the cache, layer, config, whether four devices split it)
LAYERS = [
    # Two devices have copies of a key.
    (LINEAR_ATTENTION, GatedDeltaNet, _DELTA_NET(num_v_heads=4), True),
    (LINEAR_ATTENTION, GatedDeltaNet, _DELTA_NET(num_v_heads=6), False),
    # The norm of a group is over several devices.
    (MAMBA, Mamba2, _MAMBA2(num_groups=1), True),
    (MAMBA, Mamba2, _MAMBA2(num_groups=2), True),
]


def check_own_heads() -> None:
    """Two steps give what one device computes. A device with the states of another one does not."""
    kernels = KernelSettings.for_mesh(find_mesh(4))
    for name, make_layer, config, is_split in LAYERS:
        _check_layer(make_layer(config, dtype=jnp.float32), name, kernels, is_split)


def _check_layer(layer: nnx.Module, name: str, kernels: KernelSettings, is_split: bool) -> None:
    cache = layer.config.format()
    assert (cache.on_each_of(4).content_bytes(16) < cache.content_bytes(16)) == is_split
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), state)
    rules = layer.weight_rules("") | rules_of_layers(layer, prefix="")
    split = nnx.from_flat_state(
        (path, param.replace(_split(param[...], rules[".".join(map(str, path))], kernels)))
        for path, param in nnx.to_flat_state(state)
    )
    hidden = rng.standard_normal((2, 3 * NUM_ROWS, layer.config.hidden_size)).astype(np.float32)

    def run(state: nnx.State, kernels: KernelSettings, roll: int = 0) -> np.ndarray:
        return _run_steps(nnx.merge(graphdef, state), name, hidden, kernels, roll)

    alone = run(state, KernelSettings())
    np.testing.assert_allclose(run(split, kernels), alone, rtol=1e-3, atol=1e-4, err_msg=name)
    if is_split:
        assert np.abs(run(split, kernels, roll=1) - alone).max() > 0.1, name


def _split(value_np: np.ndarray, rule: WeightRule, kernels: KernelSettings) -> jax.Array:
    rule = rule.on_mesh(value_np.shape, kernels.num_shards, splits_kv_heads=True)
    if rule.order is not None:
        value_np = value_np[..., rule.order]
    return jax.device_put(value_np, NamedSharding(kernels.mesh, split_spec(rule.axes)))


def _run_steps(
    layer: nnx.Module, name: str, hidden: np.ndarray, kernels: KernelSettings, roll: int
) -> np.ndarray:
    """The outputs of a step of three tokens per request, and of one that reads its states.

    Args:
        roll: The second step reads the states of the device that has this distance.
    """
    cache = layer.config.format().on_each_of(kernels.num_shards)
    num_blocks = 2 * cache.num_pages(4 * PAGE_WORDS) * NUM_ROWS + 1
    pages = jnp.zeros((2, num_blocks, kernels.num_shards * PAGE_WORDS), jnp.float32)
    if kernels.mesh is not None:
        pages = jax.device_put(pages, NamedSharding(kernels.mesh, PAGES_BY_DEVICE))

    @functools.partial(jax.jit, static_argnums=3, compiler_options=QUICK_COMPILE)
    def run(
        layer: nnx.State, hidden: jax.Array, pages: jax.Array, tokens_each: int
    ) -> tuple[jax.Array, jax.Array]:
        own = nnx.merge(graphdef, layer)
        context = make_context(NUM_ROWS, (), tokens_each, name=name, state_format=cache)
        context = _all_written(dataclasses.replace(context, kernels=kernels), tokens_each)
        out, pages = own(hidden, pages, context, norm=lambda x: x)
        return own.project_out(out, context), pages

    graphdef, weights = nnx.split(layer)
    first, pages = run(weights, hidden[0], pages, 3)
    pages = jnp.roll(pages, roll * PAGE_WORDS, axis=2)
    second, _ = run(weights, hidden[1, :NUM_ROWS], pages, 1)
    return np.concatenate([first, second])


def _all_written(context: LayerContext, tokens_each: int) -> LayerContext:
    """Every request starts from zero, and goes on from the slot that it wrote."""
    (states,) = context.batch.groups
    is_first = tokens_each > 1
    states = dataclasses.replace(
        states,
        read_slots=states.write_slots,
        starts_from_zero=jnp.full(NUM_ROWS, is_first),
        is_alive=jnp.ones(NUM_ROWS, bool),
        state_ends=None,
    )
    batch = dataclasses.replace(context.batch, groups=(states,))
    return dataclasses.replace(context, batch=batch)
