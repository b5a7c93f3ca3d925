"""The parameters of a loaded model by layer, also of layers that share a stack."""

import jax
import numpy as np

from models.layers.layer_stack import STACKS
from models.loading.loaded_module import LoadedModule
from models.stored_kernels.use_kernel import KernelValue


def parameters_apart(module: LoadedModule) -> dict[str, KernelValue]:
    """Like `LoadedModule.parameters`, but with NumPy arrays of each layer instead of stacks."""
    found = module.parameters
    for name, place in module.stack_places.items():
        stack = module.parameters[f"{STACKS}.{place.stack}"]
        # A slice of a JAX array would compile a program for each layer and shape.
        own = jax.tree.map(
            lambda array, p=place: np.asarray(array)[p.layer_idx :: p.num_layers], stack
        )
        is_matrix = module.weight_rules[name].layout == "matrix"
        found[name] = jax.tree.map(lambda array: array[0], own) if is_matrix else own
    return {name: value for name, value in found.items() if not name.startswith(f"{STACKS}.")}
