"""`WeightRule`: how a parameter comes out of a checkpoint, and how it is split over devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from models.errors import ModelError

# The mesh axis of tensor parallelism; the KV cache splits its heads over the same one.
MODEL_AXIS = "model"

# What may be split: attention's heads, the width inside an MLP, the vocabulary. `MODEL_AXIS` splits
# no experts: every device has a part of each.
SplitAxis = Literal["heads", "inner", "vocab", "experts"]
# - matrix: a kernel [in, out] of a `Linear`; a checkpoint stores it as [out, in]
# - experts: kernels [num_experts, in, out] of an `ExpertLinear`, for a checkpoint's
#   [num_experts, out, in]
# - table: rows that are looked up, as stored
# - vector: a number for each feature, as stored
Layout = Literal["matrix", "experts", "table", "vector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor of a checkpoint."""

    name: str  # "model.layers.0.mlp.up_proj.weight"
    shape: tuple[int, ...]  # as stored


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """One parameter.

    Args:
        sources: What it is made of. Several parameters may have parts of one source.
        layout: Tricks of a processor look at it: they must know what the axes mean.
        axes: The name of each of the parameter's axes that a mesh splits, None of the others.
        combine: Makes one array, as a checkpoint would store the parameter, of the sources' arrays.
            None takes the only source as it is.
    """

    sources: tuple[Source, ...]
    layout: Layout
    axes: tuple[SplitAxis | None, ...]
    combine: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None

    def __post_init__(self) -> None:
        num_axes = {"matrix": 2, "experts": 3, "table": 2, "vector": 1}[self.layout]
        if len(self.axes) != num_axes:
            raise ModelError(
                f"a {self.layout} has {num_axes} axes; a weight rule got {self.axes} for "
                f"{', '.join(source.name for source in self.sources)}."
            )
        if self.combine is None and len(self.sources) != 1:
            raise ModelError(
                f"a weight rule without `combine` got {len(self.sources)} sources "
                f"({', '.join(source.name for source in self.sources)}); wanted one. Say how they "
                "are combined."
            )

    def combined(self, weights_np: Sequence[np.ndarray]) -> np.ndarray:
        """The parameter as a checkpoint would store it."""
        if self.combine is not None:
            return self.combine(weights_np)
        (weight_np,) = weights_np
        return weight_np


class HasWeights(Protocol):
    """A layer class with parameters of its own."""

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """Rules of its own parameters by their attribute's name.

        Args:
            name: Of the layer in the checkpoint, as "model.norm".
        """
        ...


def rules_of_layers(model: nnx.Module, *, prefix: str) -> dict[str, WeightRule]:
    """The rules of all layers inside a model whose attributes are named as in the checkpoint.

    Args:
        prefix: Of names in the checkpoint, as "model.".

    Returns:
        Parameter name, as "layers.0.mlp.up_proj.kernel", to its rule.
    """
    return {
        f"{name}.{leaf}": rule
        for name, layer in _named_layers(model)
        for leaf, rule in layer.weight_rules(f"{prefix}{name}").items()
    }


def with_renamed_sources(
    rules: Mapping[str, WeightRule], rename: Callable[[str], str]
) -> dict[str, WeightRule]:
    """The same rules, with `rename` applied to the name of every tensor of the checkpoint."""
    return {
        name: replace(
            rule,
            sources=tuple(replace(source, name=rename(source.name)) for source in rule.sources),
        )
        for name, rule in rules.items()
    }


def _named_layers(model: nnx.Module) -> Iterator[tuple[str, HasWeights]]:
    for path, module in nnx.iter_modules(model):
        if module is not model and hasattr(module, "weight_rules"):
            yield ".".join(map(str, path)), module


def param_spec(name: str, param: jax.Array, rules: Mapping[str, WeightRule]) -> PartitionSpec:
    """How a parameter is split over a mesh with the axis `MODEL_AXIS`.

    A panel of a kernel, "....kernel.0", is whole on every device: panels are for one core, and
    their columns need not divide as the kernel's do. A kernel of int8 is turned
    (`models/loading/product_dtype.py`), and has a scale for each of its outputs.

    Raises:
        ModelError: No rule covers the parameter.
    """
    owner, _, leaf = name.rpartition(".")
    if leaf.isdecimal() and owner in rules:
        return PartitionSpec()
    rule_name = f"{owner}.kernel" if leaf == "kernel_scale" else name
    if rule_name not in rules:
        raise ModelError(f"parameter {name!r} has no weight rule; wanted one from its layer.")
    axes = rules[rule_name].axes
    if leaf == "kernel_scale":
        axes = axes[1:]
    elif rules[rule_name].layout == "matrix" and param.dtype == jnp.int8:
        axes = axes[::-1]
    split = [MODEL_AXIS if axis not in (None, "experts") else None for axis in axes]
    return PartitionSpec(*split) if any(split) else PartitionSpec()
