"""`ModuleStructure`: the parameters that a module needs, and how they are read or drawn."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from models.config.model_config import ModelConfig, ModelDtype
from models.config.split_over_devices import splits_kv_heads
from models.errors import ModelError
from models.layers.experts import ExpertLinear
from models.layers.layer_stack import STACKS, StackPlace, find_places
from models.layers.linear import Linear, name_linears
from models.layers.routing import Router
from models.loading.check_weights import HEAD_WEIGHT, check_weights
from models.loading.checkpoint import Checkpoint
from models.loading.kept_integers import keep_integers
from models.loading.kernel_encoder import KernelEncoder
from models.loading.loaded_module import flatten_state
from models.loading.quantize_in_parts import needs_parts, quantize_in_parts
from models.loading.read_ahead import read_ahead
from models.loading.split_weight import put_split
from models.loading.write_stack import finish_stack, rule_of_stack, write_layer
from models.loading.zero_biases import find_zero_biases
from models.platforms import Platform
from models.stored_kernels.stored_kernel import StoredKernel
from models.stored_kernels.use_kernel import KernelValue
from models.text_parts import is_of_other_part
from models.weight_rule import WeightRule, split_spec


class ModuleStructure:
    """A module without weights: its static structure, and what each parameter must be."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        make: Callable[..., nnx.Module],
        dtype: ModelDtype,
        encoder: KernelEncoder,
        mesh: Mesh | None = None,
        splits_experts: bool = False,
    ) -> None:
        """Makes the structure.

        Args:
            make: Makes the module from `has_head_kernel`, as families have it. The module has the
                methods for weights of `Decoder`.
            mesh: As in `load_model`.
            splits_experts: Whether each device of the mesh has its own experts.

        Raises:
            ModelError: The module cannot be split over the mesh, or its rules do not fit it.
        """
        self.config = config
        self.dtype = dtype
        tied_head = encoder.tied_head(dtype) if config.tie_word_embeddings else None
        has_head_kernel = tied_head in (None, "copy")
        abstract_model = nnx.eval_shape(lambda: make(has_head_kernel=has_head_kernel))
        class_name = type(abstract_model).__name__
        if tied_head == "columns":
            abstract_model.embed_tokens.turn()
        name_linears(abstract_model)
        linears = {
            ".".join(map(str, path)): module
            for path, module in nnx.iter_modules(abstract_model)
            if isinstance(module, Linear)
        }
        # Names of the kernels of routers.
        self.routers = {f"{name}.kernel" for name, m in linears.items() if isinstance(m, Router)}
        experts = {
            f"{'.'.join(map(str, path))}.{leaf}"
            for path, module in nnx.iter_modules(abstract_model)
            if isinstance(module, ExpertLinear)
            for leaf in module.chosen_in_place
        }
        self.graphdef, state = nnx.split(abstract_model)
        self.ignores_weight = abstract_model.ignores_weight
        self.name_weight = abstract_model.name_weight
        self.shapes: tuple[jax.ShapeDtypeStruct, ...]
        self.names, self.shapes, self.treedef = flatten_state(state)
        rules = abstract_model.weight_rules()
        if missing := [name for name in self.names if name not in rules]:
            raise ModelError(
                f"parameters {', '.join(missing)} have no weight rule. The family "
                f"{class_name} or the layers must define one for each."
            )
        if unused := sorted(rules.keys() - set(self.names)):
            raise ModelError(
                f"the family {class_name} has weight rules for {', '.join(unused)}, "
                "which are not parameters; expected names such as 'layers.0.mlp.up_proj.kernel'. "
                "Correct the names in `weight_rules`."
            )
        self.rules: tuple[WeightRule, ...] = tuple(rules[name] for name in self.names)
        for name, rule, shape in zip(self.names, self.rules, self.shapes, strict=True):
            if len(rule.axes) != shape.ndim:
                raise ModelError(
                    f"the weight rule of parameter {name!r} has axes {rule.axes}; expected one for "
                    f"each of {shape.shape}."
                )
            if rule.layout == "matrix" and name.removesuffix(".kernel") not in linears:
                raise ModelError(
                    f"parameter {name!r} has the layout 'matrix', which only kernels of `Linear` "
                    "may have. Use a `Linear`, or the layout 'table' for an array that stays as it "
                    "is stored."
                )
        if splits_experts and not any("experts" in rule.axes for rule in self.rules):
            raise ModelError(
                f"enable_expert_parallel is on, but no layer of {config.architecture} has experts. "
                "Leave it out."
            )
        self._mesh, self._splits_experts = mesh, splits_experts
        self._stack_places = self._find_stack_places(encoder, experts)
        if mesh is not None:
            splits = splits_kv_heads(config, mesh.size)
            self.rules = tuple(
                rule.on_mesh(
                    *(shape.shape, mesh.size),
                    splits_kv_heads=splits,
                    splits_experts=splits_experts,
                )
                for rule, shape in zip(self.rules, self.shapes, strict=True)
            )
            self.shapes = tuple(
                jax.ShapeDtypeStruct(rule.shape_on_mesh(shape.shape), shape.dtype)
                for rule, shape in zip(self.rules, self.shapes, strict=True)
            )

    def _find_stack_places(
        self, encoder: KernelEncoder, experts: Collection[str]
    ) -> dict[str, StackPlace]:
        """The places of experts, and of matrices of `Linear` layers that `encoder` quantizes.

        Kernels that keep the numbers of a checkpoint stay apart: whether layers have the same
        groups and zero points is known only when all numbers have been read. XLA:CPU would copy a
        matrix of floats out of its stack in each product. Quantized matrices stay apart on a mesh.
        """
        if not encoder.platform.stacks_layers or encoder.quantization == "checkpoint":
            return {}
        stacked = {}
        for name, rule, shape in zip(self.names, self.rules, self.shapes, strict=True):
            if name in experts:
                stacked[name] = shape
            elif rule.layout == "matrix" and self._mesh is None:
                is_router = name in self.routers
                if encoder.group_size_of(shape.shape[0], rule.layout, is_router=is_router):
                    stacked[name] = jax.ShapeDtypeStruct((1, *shape.shape), shape.dtype)
        return find_places(stacked)

    def fill(
        self, encoder: KernelEncoder, checkpoint: Checkpoint | None, *, seed: int
    ) -> dict[str, object]:
        """Loads the parameters, and returns the fields of a `LoadedModule`.

        Args:
            checkpoint: None draws random weights.
            seed: Of random weights.
        """
        if checkpoint is None:
            params = _random_params(self, encoder, seed)
        else:
            params = _read_params(self, encoder, checkpoint)
        values, stacks, rules = [], {}, dict(zip(self.names, self.rules, strict=True))
        for name, value in zip(self.names, params, strict=True):
            place = self._stack_places.get(name)
            values.append(value if place is None else place)
            if place is not None:
                stacks[place.stack] = write_layer(stacks.get(place.stack), value, place)
                rules[f"{STACKS}.{place.stack}"] = rule_of_stack(rules[name])
        state = jax.tree.unflatten(self.treedef, values)
        if stacks:
            state[STACKS] = {name: finish_stack(stack) for name, stack in stacks.items()}
        names, arrays, treedef = flatten_state(state)
        return {
            "config": self.config,
            "dtype": self.dtype,
            "graphdef": self.graphdef,
            "params_treedef": treedef,
            "param_names": names,
            "params": arrays,
            "weight_rules": rules,
            "platform": encoder.platform,
            "splits_experts": self._splits_experts,
        }

    def weight_bytes(self, encoder: KernelEncoder, checkpoint: Checkpoint | None) -> int:
        """Bytes that the weights will need on each device.

        Weights that stay quantized as they are stored count with the bytes of their tensors.
        """
        # Panels need as many bytes as the matrix, and cannot be made from abstract arrays.
        encoder = dataclasses.replace(encoder, panel_width=None)
        num_bytes = 0
        for name, rule, shape in zip(self.names, self.rules, self.shapes, strict=True):
            num_parts = 1 if self._mesh is None or not any(rule.axes) else self._mesh.size
            if checkpoint is not None and self.keeps(name, rule, encoder, checkpoint):
                num_bytes += _stored_bytes(rule, shape.size, checkpoint) // num_parts
                continue
            encode = functools.partial(
                encoder.encode,
                layout=rule.layout,
                is_router=name in self.routers,
                splits_inputs=splits_inputs(rule),
            )
            leaves = jax.tree.leaves(jax.eval_shape(encode, shape))
            num_bytes += sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // num_parts
        return num_bytes

    def keeps(
        self, name: str, rule: WeightRule, encoder: KernelEncoder, checkpoint: Checkpoint
    ) -> bool:
        """Whether a parameter keeps the numbers that its tensors have in the files."""
        present = [source.name for source in _without_absent(rule, checkpoint).sources]
        return (
            encoder.quantization == "checkpoint"
            and rule.layout in ("matrix", "experts")
            and name not in self.routers
            and all(n in checkpoint.weights and checkpoint.is_quantized(n) for n in present)
        )

    def sharding_of(self, rule: WeightRule) -> NamedSharding | None:
        """How a parameter with this rule is split; None: it is on the default device."""
        return self._mesh and NamedSharding(self._mesh, split_spec(rule.axes))

    def split(self, name: str, value: KernelValue) -> KernelValue:
        """Splits each array of a stored kernel over the mesh. Returns other values as they are.

        Raises:
            ModelError: An array cannot be split evenly.
        """
        if self._mesh is None or not isinstance(value, StoredKernel):
            return value
        axes = self.rule_of(name).axes
        arrays, treedef = jax.tree.flatten(value.on_mesh(axes))
        shardings = [NamedSharding(self._mesh, spec) for spec in value.specs(axes)]
        for array, sharding in zip(arrays, shardings, strict=True):
            try:
                sharding.shard_shape(array.shape)
            except ValueError as error:
                raise ModelError(
                    f"an array of the quantized parameter {name!r} has the shape {array.shape}, "
                    f"which cannot be split over {self._mesh.size} devices as {sharding.spec}. Use "
                    "quantization none, or fewer devices."
                ) from error
        return jax.tree.unflatten(treedef, jax.device_put(arrays, shardings))

    @property
    def source_names(self) -> list[str]:
        """Names of the tensors that the model needs, as weight rules have them."""
        return [source.name for rule in self.rules for source in rule.sources]

    def rule_of(self, name: str) -> WeightRule:
        return self.rules[self.names.index(name)]


def _read_params(
    structure: ModuleStructure, encoder: KernelEncoder, checkpoint: Checkpoint
) -> Iterator[KernelValue]:
    """Makes one parameter at a time, so that there is never a second copy of the model."""
    ignored = {
        name
        for name, weight in checkpoint.weights.items()
        if structure.ignores_weight(name) or structure.ignores_weight(weight.name)
    }
    if structure.config.has_other_parts:
        ignored |= set(filter(is_of_other_part, checkpoint.weights))
    if structure.config.tie_word_embeddings:
        ignored.add(HEAD_WEIGHT)
    ignored |= find_zero_biases(checkpoint, set(structure.source_names))
    rules = [_without_absent(rule, checkpoint) for rule in structure.rules]
    check_weights(
        checkpoint.weights,
        [source for rule in rules for source in rule.sources],
        ignored=ignored,
        where=str(checkpoint.folder),
    )
    kept = [
        structure.keeps(name, rule, encoder, checkpoint)
        for name, rule in zip(structure.names, rules, strict=True)
    ]
    weights = read_ahead(checkpoint, rules, kept)
    for name, rule, wanted, is_kept, sources in zip(
        structure.names, structure.rules, structure.shapes, kept, weights, strict=True
    ):
        # Combined here and not by the readers, because a combined weight is a copy, and only one
        # should exist.
        if is_kept:
            value = keep_integers(rule, sources, panel_width=encoder.scaled_panel_width)
        else:
            value = _encode(structure, encoder, name, rule, wanted.dtype, rule.combined(sources))
        _check_shape(name, value.shape, wanted.shape)
        yield structure.split(name, value)


def _encode(
    structure: ModuleStructure,
    encoder: KernelEncoder,
    name: str,
    rule: WeightRule,
    dtype: jnp.dtype,
    weight_np: np.ndarray,
) -> KernelValue:
    sharding, panel_width = structure.sharding_of(rule), encoder.scaled_panel_width
    is_router = name in structure.routers

    def encode(weight_np: np.ndarray) -> KernelValue:
        return encoder.encode(
            _put(rule, dtype, weight_np, encoder.platform, sharding),
            rule.layout,
            is_router=is_router,
            splits_inputs=splits_inputs(rule),
        )

    # Kernels that are split over a mesh have no panels, so no inputs are split here.
    if needs_parts(weight_np, panel_width) and encoder.group_size_of(
        weight_np.shape[1], rule.layout, is_router=is_router
    ):
        return quantize_in_parts(weight_np, encode, panel_width=panel_width)
    return encode(weight_np)


def _put(
    rule: WeightRule,
    dtype: jnp.dtype,
    weight_np: np.ndarray,
    platform: Platform,
    sharding: NamedSharding | None,
) -> jax.Array:
    is_transposed = rule.layout in ("matrix", "experts", "heads", "turned_table")
    if weight_np.dtype == np.float64:  # no float64 on the device
        weight_np = weight_np.astype(np.float32)
    if sharding is None:
        return platform.put_weight(weight_np, dtype, is_transposed=is_transposed)
    return put_split(weight_np, dtype, platform, is_transposed=is_transposed, sharding=sharding)


def splits_inputs(rule: WeightRule) -> bool:
    """Whether each device has some of the inputs of a matrix or of an expert."""
    return rule.layout in ("matrix", "experts") and rule.axes[-2] is not None


def _stored_bytes(rule: WeightRule, num_weights: int, checkpoint: Checkpoint) -> int:
    """Bytes that a parameter of `num_weights` takes in the files, with its scales.

    Its tensors may hold parts of other parameters too, such as a stack of gates and up projections.
    """
    names = [source.name for source in _without_absent(rule, checkpoint).sources]
    stored = sum(checkpoint.stored_bytes(name) for name in names)
    return num_weights * stored // sum(math.prod(checkpoint.weights[n].shape) for n in names)


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise ModelError(
            f"the weight rule of parameter {name!r} makes an array of shape {shape}; expected "
            f"{wanted}."
        )


def _without_absent(rule: WeightRule, checkpoint: Checkpoint) -> WeightRule:
    """The rule without the optional tensors that the checkpoint lacks."""
    present = [
        source
        for source in rule.sources
        if source.name in checkpoint.weights or not source.is_optional
    ]
    return dataclasses.replace(rule, sources=tuple(present))


def _random_params(
    structure: ModuleStructure, encoder: KernelEncoder, seed: int
) -> Iterator[KernelValue]:
    """Draws weights as an untrained model has them: normal, norms scaling by one, biases zero."""
    key = jax.random.key(seed)
    std = structure.config.initializer_range
    for param_idx, (name, rule, wanted) in enumerate(
        zip(structure.names, structure.rules, structure.shapes, strict=True)
    ):
        sharding = structure.sharding_of(rule)
        match name.rpartition(".")[2]:
            case "scale":
                yield jnp.ones(wanted.shape, wanted.dtype, device=sharding)
            case "bias" | "correction_bias" | "offset":
                yield jnp.zeros(wanted.shape, wanted.dtype, device=sharding)
            case _:
                value = encoder.encode(
                    _random_normal(
                        *(key, param_idx, std, rule.whole_shape(wanted.shape)),
                        *(wanted.dtype, sharding, rule.order),
                    ),
                    rule.layout,
                    is_router=name in structure.routers,
                    splits_inputs=splits_inputs(rule),
                )
                yield structure.split(name, value)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _random_normal(
    key: jax.Array,
    param_idx: int,
    std: float,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: NamedSharding | None,
    order: np.ndarray | None,
) -> jax.Array:
    values = jax.random.normal(jax.random.fold_in(key, param_idx), shape, jnp.float32)
    values = (std * values).astype(dtype)
    values = values if order is None else values[..., order]
    return values if sharding is None else jax.lax.with_sharding_constraint(values, sharding)
