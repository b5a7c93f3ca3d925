"""`LoadedModule`: a module with decoder layers, split into static structure and arrays."""

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from models.cache.format import Pages
from models.config.model_config import ModelConfig, ModelDtype
from models.config.split_over_devices import (
    check_context_ranks,
    check_split,
    splits_kv_heads,
)
from models.errors import ModelError
from models.forward.forward_batch import ForwardBatch
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerPlaces
from models.layers.layer_stack import STACKS, StackPlace, with_stacks
from models.platforms import Platform
from models.stored_kernels.scaled import ScaledKernel
from models.stored_kernels.stored_kernel import StoredKernel
from models.weight_rule import WeightRule, split_spec


def flatten_state(
    state: nnx.State,
) -> tuple[tuple[str, ...], tuple[jax.Array, ...], jax.tree_util.PyTreeDef]:
    """Names and arrays of all parameters, in one order, and how to put them together again."""
    leaves_with_path, treedef = jax.tree.flatten_with_path(state)
    names = tuple(".".join(_name_parts(path)) for path, _ in leaves_with_path)
    return names, tuple(leaf for _, leaf in leaves_with_path), treedef


def _name_parts(path: jax.tree_util.KeyPath) -> Iterator[str]:
    for entry in path:
        if isinstance(entry, jax.tree_util.DictKey):
            yield str(entry.key)
        elif isinstance(entry, jax.tree_util.SequenceKey):
            yield str(entry.idx)
        elif isinstance(entry, jax.tree_util.GetAttrKey) and entry.name != "value":
            yield entry.name  # an array of a `StoredKernel`; "value" is that of a Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModule:
    """A model, or a drafter of a model, that is ready to run.

    `params` is a flat tuple because JAX flattens the arguments of each step, and takes several
    times as long for an `nnx.State`. Methods that take `params` are pure functions of their
    arguments. Call them inside `jit`, and pass `params` as an argument, so that the weights do not
    become constants of the program.
    """

    config: ModelConfig
    # The dtype that it computes in. Kernels and a quantized embedding may have fewer bits.
    dtype: ModelDtype
    graphdef: nnx.GraphDef
    # Of the nnx.State that `params` are the leaves of (`with_stacks`).
    params_treedef: jax.tree_util.PyTreeDef
    # "layers.0.self_attn.q_proj.kernel", one for each of `params`. An array of a `StoredKernel` is
    # "....kernel.scales" or "....kernel.panels.0", and a stack "stacks...." (`StackPlace`).
    param_names: tuple[str, ...]
    params: tuple[jax.Array, ...]
    weight_rules: Mapping[str, WeightRule]  # by the name of the parameter or the `StoredKernel`
    platform: Platform  # for which it was loaded, and its programs are compiled
    # Of the files that the weights were read from; None if the weights are random.
    file_bytes: int | None = None
    splits_experts: bool = False  # whether each device has its own experts
    kernels: KernelSettings = KernelSettings()
    # Of the caches of each layer; the runner plans the cache and sets them (`with_places`).
    places: tuple[LayerPlaces, ...] = ()

    @property
    def parameters(self) -> dict[str, jax.Array | StoredKernel]:
        """The names of `weight_rules` -> arrays and kernels, in the order of `params`."""
        state = jax.tree.unflatten(self.params_treedef, self.params)
        leaves, _ = jax.tree.flatten_with_path(
            state, is_leaf=lambda node: isinstance(node, StoredKernel)
        )
        return {".".join(_name_parts(path)): value for path, value in leaves}

    @property
    def stack_places(self) -> dict[str, StackPlace]:
        """The places of the parameters that are in stacks, by their names."""
        state = jax.tree.unflatten(self.params_treedef, self.params)
        leaves, _ = jax.tree.flatten_with_path(
            state, is_leaf=lambda node: isinstance(node, StackPlace)
        )
        return {
            ".".join(_name_parts(path)): value
            for path, value in leaves
            if isinstance(value, StackPlace)
        }

    @property
    def param_specs(self) -> tuple[PartitionSpec, ...]:
        """How each of `params` is split over a mesh with the axis `MODEL_AXIS`."""
        specs = []
        for name, value in self.parameters.items():
            axes = self.weight_rules[name].axes
            specs += value.specs(axes) if isinstance(value, StoredKernel) else [split_spec(axes)]
        return tuple(specs)

    @property
    def product_dtypes(self) -> frozenset[str]:
        """Names of the dtypes of its parameters, as products multiply them."""
        return frozenset(
            (value.product_dtype if isinstance(value, StoredKernel) else value.dtype).name
            for value in self.parameters.values()
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on one device."""
        return sum(
            math.prod(param.sharding.shard_shape(param.shape)) * param.dtype.itemsize
            for param in self.params
        )

    def describe_weights(self) -> str:
        """Describes the memory of the weights in one line, for the log."""
        on_device = self.device_bytes
        num_devices = len(self.params[0].sharding.device_set)
        where = "the device" if num_devices == 1 else f"each of {num_devices} devices"
        parts = [] if self.file_bytes is None else [f"{self.file_bytes / 2**20:,.1f} MiB in files"]
        parts.append(f"{on_device / 2**20:,.1f} MiB on {where}")
        stacked = Counter(f"{STACKS}.{place.stack}" for place in self.stack_places.values())
        kernels = [
            (value, stacked.get(name, 1))
            for name, value in self.parameters.items()
            if self.weight_rules[name].layout in ("matrix", "experts")
            or isinstance(value, ScaledKernel)
        ]
        num_scaled = sum(n for kernel, n in kernels if isinstance(kernel, ScaledKernel))
        if num_scaled:
            num_kernels = sum(n for _, n in kernels)
            parts.append(f"{num_scaled} of {num_kernels} kernels in 4 or 8 bits")
        return f"weights: {', '.join(parts)}"

    @property
    def class_name(self) -> str:
        """The model class, such as "models.families.llama.LlamaForCausalLM"."""
        model_class = self.graphdef.nodes[0].type
        return f"{model_class.__module__}.{model_class.__qualname__}"

    @property
    def packages(self) -> frozenset[str]:
        """Top-level packages that define its family and layers: "models", and other people's."""
        types = {getattr(node, "type", object) for node in self.graphdef.nodes}
        names = {base.__module__.partition(".")[0] for cls in types for base in cls.__mro__}
        return frozenset(names - {"flax", *sys.stdlib_module_names})

    def with_kernels(self, kernels: KernelSettings) -> Self:
        """The same model calling the ops on the KV cache in another way.

        Raises:
            ModelError: It cannot be split over the mesh, or its heads are split over another one.
        """
        check_split(self.config, kernels.num_shards)
        check_context_ranks(self.config, kernels.num_shards, kernels.num_context_ranks)
        for name, rule in self.weight_rules.items():
            if rule.num_devices != rule.parts_on(kernels.num_shards):
                raise ModelError(
                    f"parameter {name!r} was loaded for {rule.num_devices} devices, and cannot be "
                    f"used on {kernels.num_shards}: each device has its own heads of it. Load the "
                    "model with the mesh that runs it."
                )
        splits = splits_kv_heads(self.config, kernels.num_shards)
        kernels = dataclasses.replace(
            kernels,
            splits_kv_heads=splits,
            splits_experts=self.splits_experts,
            fuses_state_writes=self.platform.fuses_state_writes,
        )
        return dataclasses.replace(self, kernels=kernels)

    def with_places(self, places: Sequence[LayerPlaces]) -> Self:
        """Returns the same module with the place of each layer's caches in the KV cache.

        Raises:
            ModelError: There are not as many places as layers.
        """
        num_layers = self.config.num_layers
        if len(places) != num_layers:
            raise ModelError(
                f"got places in the KV cache for {len(places)} layers; the model has {num_layers}, "
                "and wants one for each."
            )
        return dataclasses.replace(self, places=tuple(places))

    def _check_places(self, batch: ForwardBatch, pages: Pages) -> None:
        """Checks the places, because JAX would use the last row for one that is out of range."""
        if not self.places:
            raise ModelError(
                "the model's layers have no places in a KV cache; expected one for each, from "
                "`with_places`."
            )
        num_rows, num_groups = pages.shape[0], [inputs.num_groups for inputs in batch.groups]
        for name, place in (cache for places in self.places for cache in places):
            has_inputs = place.inputs_idx < len(num_groups)
            has_group = has_inputs and place.group_idx < num_groups[place.inputs_idx]
            if not has_group or place.row >= num_rows:
                raise ModelError(
                    f"a layer's cache {name!r} is in group {place.group_idx} of the inputs "
                    f"{place.inputs_idx}, row {place.row}; the batch has inputs of {num_groups} "
                    f"groups, and the pages have {num_rows} rows. Take all from one plan of KV "
                    "cache groups."
                )

    def _merge(self, params: tuple[jax.Array, ...]) -> nnx.Module:
        state = jax.tree.unflatten(self.params_treedef, params)
        return nnx.merge(self.graphdef, with_stacks(state))
