"""Checks of recurrent layers whose heads are split over simulated devices (`split_engine`)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from models.forward.kernel_settings import PAGES_BY_DEVICE, WHOLE, KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.gated_delta_net import LINEAR_ATTENTION, GatedDeltaNet, GatedDeltaNetConfig
from models.layers.kimi_delta_attention import DELTA_ATTENTION, KimiDeltaAttention, KimiDeltaConfig
from models.layers.mamba2 import MAMBA, Mamba2, Mamba2Config
from models.weight_rule import WeightRule, rules_of_layers, split_spec
from paxkv.runner.memory.device_mesh import find_mesh
from tests.models.layers.test_advance_states import HEADS, NUM_ROWS, PAGE_WORDS, SIZES, make_context
from tests.quick_compile import QUICK_COMPILE

_MAMBA2 = functools.partial(Mamba2Config, **SIZES, **HEADS, state_size=6, eps=1e-6)
_DELTA_NET = functools.partial(
    GatedDeltaNetConfig, **SIZES, num_k_heads=2, k_dim=4, v_dim=6, eps=1e-6
)
_KIMI = functools.partial(KimiDeltaConfig, **SIZES, **HEADS, eps=1e-6)
# (name of the cache, layer, config, whether four devices split it)
LAYERS = [
    # Two devices have copies of a key.
    (LINEAR_ATTENTION, GatedDeltaNet, _DELTA_NET(num_v_heads=4), True),
    # The norm of a group is over several devices.
    (MAMBA, Mamba2, _MAMBA2(num_groups=1), True),
    (DELTA_ATTENTION, KimiDeltaAttention, _KIMI(), True),
]
MORE_LAYERS = [
    (LINEAR_ATTENTION, GatedDeltaNet, _DELTA_NET(num_v_heads=6), False),
    (MAMBA, Mamba2, _MAMBA2(num_groups=2), True),
    (DELTA_ATTENTION, KimiDeltaAttention, _KIMI(has_inner_vectors=False), True),
]

# Computes both steps. After the first one, the states move by this number of devices.
Run = Callable[[int], np.ndarray]


def check_own_heads(layers: Sequence[Any]) -> None:
    """Four devices compute in two steps what one device computes.

    They compute something else if each one has the states of another one in the second step.

    Args:
        layers: `LAYERS` or `MORE_LAYERS`.
    """
    for name, make_layer, config, is_split in layers:
        layer = nnx.eval_shape(functools.partial(make_layer, config, dtype=jnp.float32))
        _check_layer(layer, name, is_split)


def _check_layer(layer: nnx.Module, name: str, is_split: bool) -> None:
    cache = layer.config.format()
    assert (cache.on_each_of(4).content_bytes(16) < cache.content_bytes(16)) == is_split
    kernels = KernelSettings.for_mesh(find_mesh(4))
    rng = np.random.default_rng(0)
    graphdef, shapes = nnx.split(layer)
    state = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), shapes)
    rules = rules_of_layers(layer, prefix="") | layer.weight_rules("")
    split = nnx.from_flat_state(
        (path, param.replace(_split(param[...], rules[".".join(map(str, path))], kernels)))
        for path, param in nnx.to_flat_state(state)
    )
    hidden = rng.standard_normal((2, 3 * NUM_ROWS, layer.config.hidden_size)).astype(np.float32)

    def make_run(state: nnx.State, kernels: KernelSettings) -> Run:
        return _make_run(nnx.merge(graphdef, state), name, hidden, kernels)

    alone, run = make_run(state, KernelSettings())(0), make_run(split, kernels)
    np.testing.assert_allclose(run(0), alone, rtol=1e-3, atol=1e-4, err_msg=name)
    if is_split:
        assert np.abs(run(1) - alone).max() > 0.1, name


def _split(value_np: np.ndarray, rule: WeightRule, kernels: KernelSettings) -> jax.Array:
    rule = rule.on_mesh(value_np.shape, kernels.num_shards, splits_kv_heads=True)
    if rule.order is not None:
        value_np = value_np[..., rule.order]
    return jax.device_put(value_np, NamedSharding(kernels.mesh, split_spec(rule.axes)))


def _make_run(layer: nnx.Module, name: str, hidden: np.ndarray, kernels: KernelSettings) -> Run:
    """Makes a step of three tokens per request, and a step of one token that reads its states.

    The last token of each request in the first step is a draft. `state_ends` has the places of the
    drafts. It is an array from the host, as in engines.
    """
    cache = layer.config.format().on_each_of(kernels.num_shards)
    num_blocks = 2 * cache.num_pages(4 * PAGE_WORDS) * NUM_ROWS + 1
    empty = jnp.zeros((2, num_blocks, kernels.num_shards * PAGE_WORDS), jnp.float32)
    state_ends = jnp.arange(2, 3 * NUM_ROWS, 3, dtype=jnp.int32)
    if kernels.mesh is not None:
        empty = jax.device_put(empty, NamedSharding(kernels.mesh, PAGES_BY_DEVICE))
        state_ends = jax.device_put(state_ends, NamedSharding(kernels.mesh, WHOLE))
    graphdef, weights = nnx.split(layer)

    @functools.partial(jax.jit, static_argnums=3, compiler_options=QUICK_COMPILE)
    def step(
        weights: nnx.State,
        hidden: jax.Array,
        pages: jax.Array,
        tokens_each: int,
        state_ends: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        own = nnx.merge(graphdef, weights)
        context = make_context(NUM_ROWS, (), tokens_each, name=name, state_format=cache)
        context = dataclasses.replace(context, kernels=kernels)
        context = _all_written(context, tokens_each, state_ends)
        out, pages = own(hidden, pages, context, norm=lambda x: x)
        return own.project_out(out, context), pages

    def run(num_moved: int) -> np.ndarray:
        first, pages = step(weights, hidden[0], empty, 3, state_ends)
        moved = jax.device_put(np.roll(pages, num_moved * PAGE_WORDS, axis=2), pages.sharding)
        second, _ = step(weights, hidden[1, :NUM_ROWS], moved, 1)
        return np.concatenate([first, second])

    return run


def _all_written(
    context: LayerContext, tokens_each: int, state_ends: jax.Array | None
) -> LayerContext:
    """Every request starts from zero, and goes on from the slot that it wrote."""
    (states,) = context.batch.groups
    is_first = tokens_each > 1
    states = dataclasses.replace(
        states,
        read_slots=states.write_slots,
        starts_from_zero=jnp.full(NUM_ROWS, is_first),
        is_alive=jnp.ones(NUM_ROWS, bool),
        state_ends=state_ends,
    )
    batch = dataclasses.replace(context.batch, groups=(states,))
    return dataclasses.replace(context, batch=batch)
