"""One layer that stands for several of the same structure: a loop chooses which."""

from collections.abc import Sequence
from typing import TypeVar

import jax
from flax import nnx

from models.errors import ModelError
from models.layers.chosen_kernel import ChosenKernel

Layer = TypeVar("Layer", bound=nnx.Module)


def choose_layer(
    layers: Sequence[Layer],
    layer_idx: jax.Array,  # i32[], in [0, len(layers))
) -> Layer:
    """A layer that computes with the parameters of `layers[layer_idx]`.

    What is not a parameter is that of the first, so the layers must be alike but for parameters.
    Kernels become a `ChosenKernel`. All others, which are vectors, come out of one switch, which
    copies them.

    Raises:
        ModelError: The layers do not have the same parameters.
    """
    if len(layers) == 1:
        return layers[0]
    graphdef, first = nnx.split(layers[0])
    states = [dict(nnx.to_flat_state(nnx.state(layer))) for layer in layers]
    if any(state.keys() != states[0].keys() for state in states):
        raise ModelError(
            "layers of one kind have other parameters than each other; wanted layers that differ "
            "in what `Attention.kind` tells."
        )
    small = [path for path in states[0] if not _is_kernel(path)]
    branches = [lambda state=state: [state[path].get_value() for path in small] for state in states]
    values = dict(zip(small, jax.lax.switch(layer_idx, branches), strict=True))
    for path in filter(_is_kernel, states[0]):
        kernels = tuple(state[path].get_value() for state in states)
        values[path] = ChosenKernel(layer_idx=layer_idx, kernels=kernels)
    chosen = [(path, param.replace(values[path])) for path, param in states[0].items()]
    return nnx.merge(graphdef, nnx.from_flat_state(chosen))


def _is_kernel(path: tuple[str | int, ...]) -> bool:
    return path[-1] == "kernel"
