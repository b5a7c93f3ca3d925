"""One layer that stands for several layers of the same structure, with a traced layer number."""

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from models.errors import ModelError
from models.layers.chosen_kernel import ChosenKernel
from models.layers.layer_stack import InStack, choose_in_stack

Layer = TypeVar("Layer", bound=nnx.Module)
Path = tuple[str | int, ...]


def kind_of(layer: nnx.Module) -> Hashable:
    """A value that is equal for two layers if only the values of their parameters differ.

    If `choose_layer` would copy large parameters of the layer, the value equals no other one.
    """
    if any(True for _ in _copied_matrices(layer)):
        return object()
    graphdef, state = nnx.split(layer)
    leaves, treedef = jax.tree.flatten(state)
    return graphdef, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def choose_layer(
    layers: Sequence[Layer],
    layer_idx: jax.Array,  # i32[], in [0, len(layers))
) -> Layer:
    """Returns a layer that computes with the parameters of `layers[layer_idx]`.

    Attributes that are not parameters come from `layers[0]`, so the layers must be of one kind
    (`kind_of`). Parameters that their module lists in `chosen_in_place` become a `ChosenKernel`, or
    stay an `InStack`. The other parameters are vectors. One switch chooses and copies them.

    Raises:
        ModelError: The layers do not have the same parameters, or a parameter that would be copied
            is larger than a vector.
    """
    if len(layers) == 1:
        return layers[0]
    graphdef, first = nnx.split(layers[0])
    states = [dict(nnx.to_flat_state(nnx.state(layer))) for layer in layers]
    if any(state.keys() != states[0].keys() for state in states):
        raise ModelError(
            "layers of one loop have different parameters; expected layers that `kind_of` calls "
            "equal."
        )
    if names := [".".join(map(str, path)) for path in _copied_matrices(layers[0])]:
        raise ModelError(
            f"parameters {', '.join(names)} would be copied in every turn of a loop over layers; "
            "wanted vectors, and kernels that their module lists in `chosen_in_place`. Run these "
            "layers in turn."
        )
    kernels = set(_kernel_paths(layers[0]))
    small = [path for path in states[0] if path not in kernels]
    branches = [lambda state=state: [state[path].get_value() for path in small] for state in states]
    values = dict(zip(small, jax.lax.switch(layer_idx, branches), strict=True))
    for path in kernels:
        of_layers = tuple(state[path].get_value() for state in states)
        if isinstance(of_layers[0], InStack):
            values[path] = choose_in_stack(of_layers, layer_idx)
        else:
            values[path] = ChosenKernel(layer_idx=layer_idx, kernels=of_layers)
    chosen = [(path, param.replace(values[path])) for path, param in states[0].items()]
    return nnx.merge(graphdef, nnx.from_flat_state(chosen))


def _kernel_paths(layer: nnx.Module) -> Iterator[Path]:
    for path, module in nnx.iter_modules(layer):
        for leaf in getattr(module, "chosen_in_place", ()):
            if getattr(module, leaf) is not None:
                yield (*path, leaf)


def _copied_matrices(layer: nnx.Module) -> Iterator[Path]:
    """Parameters that are neither vectors nor chosen in place."""
    kernels = set(_kernel_paths(layer))
    for path, param in nnx.to_flat_state(nnx.state(layer)):
        if path not in kernels and jnp.ndim(param.get_value()) > 1:
            yield path
