"""Parameters of several layers in one array, so that a loop over layers needs no switch.

A switch would have a branch per layer. Products with experts and with quantized matrices are loops,
so these branches would be most of a program. The matrix of expert e of layer l is matrix
`e * num_layers + l` of the stack. The matrix of a `Linear` counts as the only expert of its layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.stored_kernels.use_kernel import KernelValue
from pallas_kernels import GroupTiles

# The key of the stacks in an `nnx.State`, and the start of their names.
STACKS = "stacks"


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlace:
    """In an `nnx.State`, stands for the parameter of one layer, whose numbers are in a stack."""

    stack: str
    layer_idx: int  # among the layers of the stack
    num_layers: int
    shape: tuple[int, ...]  # of the parameter: [num_experts, ...], or [1, in, out] of a `Linear`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class InStack:
    """The value of a parameter of one layer, which a loop may choose."""

    stack: KernelValue  # [num_experts * num_layers, ...]
    layer_idx: jax.Array | np.int32
    num_layers: int = field(metadata={"static": True})

    def tiles(self, tiles: GroupTiles) -> GroupTiles:
        """The same tiles, with groups of the stack.

        Example: with 8 experts in each of 3 layers, group 2 of layer 1 is group 7. Group 8, which
        does not exist, becomes 25, which does not exist either.
        """
        return tiles._replace(groups=tiles.groups * self.num_layers + self.layer_idx)


def find_places(shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, StackPlace]:
    """Name of each parameter that shares a stack with another one -> its place.

    Args:
        shapes: Of parameters as in `StackPlace`, by names like "layers.3.mlp.up_proj.kernel".
            Parameters of one shape and dtype share a stack if only numbers in their names differ.
    """
    stacks: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        parts = ["*" if part.isdecimal() else part for part in name.split(".")]
        sizes = "x".join(map(str, shape.shape))
        stacks.setdefault(f"{'.'.join(parts)}:{shape.dtype.name}[{sizes}]", []).append(name)
    return {
        name: StackPlace(
            stack=stack, layer_idx=layer_idx, num_layers=len(names), shape=shapes[name].shape
        )
        for stack, names in stacks.items()
        if len(names) > 1
        for layer_idx, name in enumerate(names)
    }


def with_stacks(state: nnx.State) -> nnx.State:
    """The state of the module: each `StackPlace` becomes an `InStack`."""
    if STACKS not in state:
        return state
    stacks = state[STACKS]

    def find(value: object) -> object:
        if not isinstance(value, StackPlace):
            return value
        return InStack(
            stack=stacks[value.stack],
            layer_idx=np.int32(value.layer_idx),
            num_layers=value.num_layers,
        )

    own = nnx.State({key: value for key, value in state.items() if key != STACKS})
    return jax.tree.map(find, own, is_leaf=lambda node: isinstance(node, StackPlace))


def choose_in_stack(of_layers: Sequence[InStack], layer_idx: jax.Array) -> InStack:
    """The value of layer `layer_idx` of a loop, whose layers have values in one stack."""
    places = jnp.array([int(value.layer_idx) for value in of_layers], jnp.int32)
    return replace(of_layers[0], layer_idx=places[layer_idx])
