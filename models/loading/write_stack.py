"""Writes parameters of several layers into one array (`models/layers/layer_stack.py`)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from models.layers.layer_stack import StackPlace
from models.platforms.huge_pages import empty_in_huge_pages
from models.stored_kernels.use_kernel import KernelValue
from models.weight_rule import WeightRule


def write_layer(stack: KernelValue | None, value: KernelValue, place: StackPlace) -> KernelValue:
    """Writes a layer into its stack, in place. Call `finish_stack` after the last layer.

    Args:
        stack: The stack so far. None makes a stack, which a mesh splits as it splits `value`.
        value: The parameter of one layer. All values of a stack must be stored in the same form.
    """
    if len(value.shape) < len(place.shape):
        value = jax.tree.map(lambda array: array[None], value)
    if stack is None:
        stack = jax.tree.map(functools.partial(_empty_stack, num_layers=place.num_layers), value)
    return jax.tree.map(functools.partial(_write, layer_idx=place.layer_idx), stack, value)


def finish_stack(stack: KernelValue) -> KernelValue:
    """The stack on its devices."""
    return jax.tree.map(
        lambda array: (
            jax.device_put(array, may_alias=True) if isinstance(array, np.ndarray) else array
        ),
        stack,
    )


def rule_of_stack(rule: WeightRule) -> WeightRule:
    """The rule of a stack, from that of a parameter in it."""
    if rule.layout != "matrix":
        return rule
    return dataclasses.replace(rule, layout="experts", axes=(None, *rule.axes))


def _mesh_sharding(value: jax.Array) -> NamedSharding | None:
    """How a mesh splits a value and its stack; None without a mesh."""
    return value.sharding if isinstance(value.sharding, NamedSharding) else None


def _empty_stack(value: jax.Array, *, num_layers: int) -> jax.Array | np.ndarray:
    shape = (len(value) * num_layers, *value.shape[1:])
    sharding = _mesh_sharding(value)
    if sharding is None:  # without a mesh, a CPU uses the host's array without a copy
        return empty_in_huge_pages(shape, value.dtype)
    return jnp.zeros(shape, value.dtype, device=sharding)


def _write(
    stack: jax.Array | np.ndarray, value: jax.Array, layer_idx: int
) -> jax.Array | np.ndarray:
    if isinstance(stack, jax.Array):
        return _write_on_mesh(stack, value, layer_idx, value.sharding)
    stack.reshape(len(value), -1, *value.shape[1:])[:, layer_idx] = value
    return stack


@functools.partial(jax.jit, donate_argnums=0, static_argnames="sharding")
def _write_on_mesh(
    stack: jax.Array, value: jax.Array, layer_idx: int, sharding: NamedSharding
) -> jax.Array:
    by_expert = stack.reshape(len(value), -1, *value.shape[1:])
    written = lax.dynamic_update_index_in_dim(by_expert, value, layer_idx, axis=1)
    return lax.with_sharding_constraint(written.reshape(stack.shape), sharding)
