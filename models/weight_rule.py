"""`WeightRule`: how the loader makes a parameter, and how a mesh splits it over devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from models.errors import ModelError
from models.head_split import HeadSplit, num_parts

# The mesh axis of tensor parallelism; the KV cache splits its heads over the same one.
MODEL_AXIS = "model"

# Names of axes: attention's heads, KV heads, the inner width of an MLP, the vocabulary and experts.
# A mesh splits all over `MODEL_AXIS`, with three exceptions (`on_mesh`):
# - KV heads stay whole if there are fewer of them than devices.
# - The vocabulary stays whole if its size is no multiple of the number of devices.
# - Experts stay whole, because every device has a part of each expert. With expert parallelism,
#   each device has some experts, which are whole ("own_experts").
SplitAxis = Literal["heads", "kv_heads", "inner", "vocab", "experts", "own_experts"]
# - matrix: the kernel [in, out] of a `Linear`; a checkpoint stores it as [out, in]
# - experts: the kernels [num_experts, in, out] of an `ExpertLinear`; `combine` makes
#   [num_experts, out, in] from a checkpoint
# - heads: the kernels [heads, in, out] of a `HeadLinear`; `combine` makes [heads, out, in]
# - table: an array of rows that are looked up; stored as in the checkpoint
# - turned_table: the transpose of a table
# - vector: one axis; stored as in the checkpoint
Layout = Literal["matrix", "experts", "heads", "table", "turned_table", "vector"]
_NUM_AXES: dict[Layout, int] = {
    "matrix": 2,
    "experts": 3,
    "heads": 3,
    "table": 2,
    "turned_table": 2,
    "vector": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor of a checkpoint."""

    name: str  # "model.layers.0.mlp.up_proj.weight"
    shape: tuple[int, ...]  # as stored
    # Shapes that checkpoints of other software have for it.
    other_shapes: tuple[tuple[int, ...], ...] = ()
    # Whether a checkpoint may lack it. `combine` then gets no array for it.
    is_optional: bool = False
    # Whether it is an index or a distance, and not a floating-point number.
    is_integer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """How one parameter is made and split.

    Args:
        sources: The tensors that the parameter is made of. Several parameters may have parts of one
            source.
        layout: The meaning of the parameter's axes. It decides how the loader may store them.
        axes: For each axis of the parameter, its name if it has one, or None.
        combine: Makes the parameter from the arrays of the sources, in the form in which a
            checkpoint would store it. None: the only source has this form.
        heads: The heads of a recurrent layer that the outputs of a matrix or the entries of a
            vector belong to. If `HeadSplit.is_split`, a mesh splits them, and the last of `axes`
            has no effect.
        num_devices: The number of devices among which the parameter's heads are split (`on_mesh`).
    """

    sources: tuple[Source, ...]
    layout: Layout
    axes: tuple[SplitAxis | None, ...]
    combine: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None
    heads: HeadSplit | None = None
    num_devices: int = 1

    def __post_init__(self) -> None:
        num_axes = _NUM_AXES[self.layout]
        if len(self.axes) != num_axes:
            raise ModelError(
                f"a {self.layout} has {num_axes} axes; a weight rule got {self.axes} for "
                f"{', '.join(source.name for source in self.sources)}."
            )
        if self.combine is None and len(self.sources) != 1:
            raise ModelError(
                f"a weight rule without `combine` has {len(self.sources)} sources "
                f"({', '.join(source.name for source in self.sources)}); expected one. Pass "
                "`combine` to combine them."
            )

    def on_mesh(
        self,
        shape: tuple[int, ...],
        num_devices: int,
        *,
        splits_kv_heads: bool,
        splits_experts: bool = False,
    ) -> "WeightRule":
        """The rule for a mesh of `num_devices`. Axes that the mesh does not split are None.

        Args:
            shape: Of the parameter.
            splits_kv_heads: See `models.config.split_over_devices.splits_kv_heads`.
            splits_experts: Whether each device has its own experts.

        Raises:
            ModelError: An axis has to be split and cannot be.
        """
        if splits_experts and "experts" in self.axes:
            axes = tuple("own_experts" if axis == "experts" else None for axis in self.axes)
        else:
            axes = tuple(
                None if is_whole(axis, size, num_devices, splits_kv_heads=splits_kv_heads) else axis
                for axis, size in zip(self.axes, shape, strict=True)
            )
        if self.parts_on(num_devices) > 1:
            return replace(self, axes=(*axes[:-1], "heads"), num_devices=num_devices)
        for axis, size in zip(axes, shape, strict=True):
            if axis is not None and size % num_devices:
                raise ModelError(
                    f"a parameter of {self.sources[0].name} has {size} entries along the axis "
                    f"{axis!r}, which cannot be split over {num_devices} devices; expected a "
                    "multiple. Use fewer devices."
                )
        return replace(self, axes=axes)

    def parts_on(self, num_devices: int) -> int:
        """Parts into which a mesh splits the heads: one per device, or 1 if they stay whole."""
        if self.heads is None:
            return 1
        return num_parts(self.heads.heads_of_layer, num_devices)

    @property
    def order(self) -> np.ndarray | None:
        """The entries of all devices, as `HeadSplit.order`. None: the order of the checkpoint."""
        return None if self.num_devices == 1 else self.heads.order(self.num_devices)

    def shape_on_mesh(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameter, which is `shape` on one device."""
        return shape if self.order is None else (*shape[:-1], len(self.order))

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape on one device of the parameter, which is `shape` on the mesh."""
        return shape if self.order is None else (*shape[:-1], self.heads.size)

    def combined(self, weights_np: Sequence[np.ndarray]) -> np.ndarray:
        """The parameter as a checkpoint would store it, with the heads in the order of devices."""
        if self.combine is not None:
            weight_np = self.combine(weights_np)
        else:
            (weight_np,) = weights_np
        return weight_np if self.order is None else weight_np[self.order]


class HasWeights(Protocol):
    """A layer class with parameters of its own."""

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """The rules of the layer's own parameters, by the name of their attribute.

        Args:
            name: The layer's name in the checkpoint, such as "model.norm".
        """
        ...


def rules_of_layers(model: nnx.Module, *, prefix: str) -> dict[str, WeightRule]:
    """The rules of all layers inside a model whose attributes are named as in the checkpoint.

    Args:
        prefix: The start of all names in the checkpoint, such as "model.".

    Returns:
        Name of each parameter, such as "layers.0.mlp.up_proj.kernel" -> its rule.
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


def with_stored_names(
    rules: Mapping[str, WeightRule], stored_names: Mapping[str, str]
) -> dict[str, WeightRule]:
    """The same rules, with parts of the names of tensors replaced, one after the other.

    Args:
        stored_names: Part of a name here -> the part in checkpoints.
    """

    def rename(name: str) -> str:
        for own, stored in stored_names.items():
            name = name.replace(own, stored)
        return name

    return with_renamed_sources(rules, rename)


def _named_layers(model: nnx.Module) -> Iterator[tuple[str, HasWeights]]:
    for path, module in nnx.iter_modules(model):
        if module is not model and hasattr(module, "weight_rules"):
            yield ".".join(map(str, path)), module


def is_whole(axis: SplitAxis | None, size: int, num_devices: int, *, splits_kv_heads: bool) -> bool:
    """Whether every device has all of an axis."""
    match axis:
        case "kv_heads":
            return not splits_kv_heads
        case "vocab":
            return size % num_devices != 0
    return axis in (None, "experts")


def split_spec(axes: Sequence[SplitAxis | None]) -> PartitionSpec:
    """How an array with these axes is split over a mesh with the axis `MODEL_AXIS`."""
    split = [MODEL_AXIS if axis not in (None, "experts") else None for axis in axes]
    return PartitionSpec(*split) if any(split) else PartitionSpec()
