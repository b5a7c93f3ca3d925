"""Mixtures of experts: many MLPs per layer, and each token goes through a few of them."""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config.dense_config import Activation
from models.config.moe_config import MoEConfig
from models.errors import WeightMismatchError
from models.forward.kernel_settings import BY_DEVICE, WHOLE, ExpertSplit, KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.chosen_kernel import ChosenKernel, with_kernel
from models.layers.expert_parallel import rows_of_tiles, tiles_of_own_experts
from models.layers.layer_stack import InStack
from models.layers.mlp import activate
from models.layers.routing import Routing
from models.stored_kernels.use_kernel import KernelValue, multiply_groups
from models.weight_rule import MODEL_AXIS, Source, WeightRule
from pallas_kernels import GroupTiles, make_group_tiles

# The name of a `LayerContext.report`: the number of rows that go through each expert of a layer,
# i32[num_experts]. A row that goes through several experts counts once for each of them.
EXPERT_TOKENS = "expert_tokens"


class ExpertLinear(nnx.Module):
    """A `Linear` for each expert: `x @ kernel[expert] + bias[expert]`.

    The rows of x are in tiles, and each tile has rows of one expert (`make_group_tiles`). Step
    features cannot change the output (`LayerContext.add_linear_change`).
    """

    chosen_in_place: ClassVar[tuple[str, ...]] = ("kernel", "bias")

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        split: Literal["in", "out"],
        is_of_attention: bool = False,
        use_bias: bool = False,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            split: Whether a mesh splits the input features or the output features.
            is_of_attention: Whether a mesh splits these features even with expert parallelism,
                because it splits the heads of attention.
        """
        self.split = split
        self.is_of_attention = is_of_attention
        self.kernel = nnx.Param(jnp.zeros((num_experts, in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((num_experts, out_features), dtype)) if use_bias else None

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`. A checkpoint has one weight tensor for each expert.

        Checkpoints store biases of experts in different ways, so a family makes their rules.
        """
        num_experts, in_features, out_features = self.kernel.get_value().shape
        owner, _, local = name.rpartition(".")
        sources = tuple(
            Source(name=f"{owner}.{expert}.{local}.weight", shape=(out_features, in_features))
            for expert in range(num_experts)
        )
        inner = ("inner", None) if self.split == "in" else (None, "inner")
        experts = None if self.is_of_attention else "experts"
        kernel = WeightRule(
            sources=sources, layout="experts", axes=(experts, *inner), combine=np.stack
        )
        return {"kernel": kernel}

    def __call__(
        self,
        x: jax.Array,  # f[num_tiles * tile_rows, in_features]
        tiles: GroupTiles,
        context: LayerContext,
        *,
        in_parts: bool = False,
    ) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
        """The outputs at all places.

        Args:
            in_parts: With input features that a mesh splits, the result has the parts of each
                device, one after the other, f[num_devices * num_tiles * tile_rows, out_features].
                Their sum is the output.
        """
        kernels = context.kernels
        split = self.split
        if kernels.splits_experts and not self.is_of_attention:
            split = "experts"
        elif in_parts and kernels.num_shards > 1:
            split = "parts"
        kernel, own_tiles = _find_stack(self.kernel.get_value(), tiles)
        y = multiply_groups(x, kernel, own_tiles, kernels, split=split)
        if self.bias is None:
            return y
        biases, own_tiles = _find_stack(self.bias.get_value(), tiles)
        bias = with_kernel(
            functools.partial(_biases_of_tiles, kernels=kernels, split=split),
            *(own_tiles.groups, biases),
        )
        return y + jnp.repeat(bias, x.shape[0] // tiles.groups.shape[0], axis=0)


def _find_stack(
    value: KernelValue | ChosenKernel | InStack, tiles: GroupTiles
) -> tuple[KernelValue | ChosenKernel, GroupTiles]:
    """The array or kernel that a parameter is in, and the tiles with its groups."""
    return (value.stack, value.tiles(tiles)) if isinstance(value, InStack) else (value, tiles)


def _biases_of_tiles(
    groups: jax.Array,  # i32[num_tiles]
    bias: jax.Array,  # f[num_experts, out_features]
    *,
    kernels: KernelSettings,
    split: ExpertSplit,
) -> jax.Array:  # f[num_tiles, out_features], or of all devices
    """The bias of each tile's expert; that of tiles without rows is undefined."""

    def find(groups: jax.Array, bias: jax.Array) -> jax.Array:
        found = bias.at[groups].get(mode="clip")
        if split == "parts":  # added on one device only
            found = jnp.where(jax.lax.axis_index(MODEL_AXIS) == 0, found, 0)
        return found

    if split in ("in", "out"):
        return find(groups, bias)
    spec = BY_DEVICE if split == "experts" else WHOLE
    return kernels.by_device(find, groups, bias, in_specs=(spec, spec), out_specs=BY_DEVICE)


class Experts(nnx.Module):
    """Gated MLPs, one per expert. Each row goes through the experts that its `Routing` lists.

    No row is dropped, even if all rows choose the same expert. Padding rows go through no expert.
    """

    # Whether `finish` of a sum is the sum of `finish`. Devices then add the weighted sums of their
    # parts: one row per token, instead of one per choice.
    adds_parts: ClassVar[bool] = True

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        use_bias: bool = False,
        dtype: jnp.dtype,
    ) -> None:
        linear = functools.partial(ExpertLinear, num_experts, use_bias=use_bias, dtype=dtype)
        self.gate_proj = linear(hidden_size, intermediate_size, split="out")
        self.up_proj = linear(hidden_size, intermediate_size, split="out")
        self.down_proj = linear(intermediate_size, hidden_size, split="in")
        self.num_experts = num_experts
        self.activation = activation

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        routing: Routing,
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        top_k = routing.expert_ids.shape[1]
        choices = choices_of_used_rows(routing.expert_ids, self.num_experts, context)
        context.report(EXPERT_TOKENS, functools.partial(self._count_choices, choices))
        kernels = context.kernels
        if kernels.splits_experts:
            tiles = tiles_of_own_experts(choices.reshape(-1), self.num_experts, kernels)
            chosen = rows_of_tiles(x, tiles.rows // top_k, kernels)
        else:
            tiles = tiles_of_choices(choices, self.num_experts, context)
            chosen = x[tiles.rows // top_k]
        inner = self.inner(chosen, tiles, context)
        down = self.finish(self.down_proj(inner, tiles, context, in_parts=self.adds_parts))
        if kernels.splits_experts or (self.adds_parts and kernels.num_shards > 1):
            total = _sum_of_devices(down, tiles.places, routing.weights, kernels)
        else:
            total = sum_of_choices(down, tiles.places, routing.weights)
        return total.astype(x.dtype)

    def _count_choices(
        self,
        choices: jax.Array,  # i32[num_rows, top_k], in [0, num_experts]
    ) -> jax.Array:  # i32[num_experts]
        # A scatter would compute one row after the other on a CPU.
        experts = jnp.arange(self.num_experts, dtype=jnp.int32)
        return (choices.reshape(-1, 1) == experts).sum(axis=0, dtype=jnp.int32)

    def inner(
        self,
        chosen: jax.Array,  # f[places, hidden]
        tiles: GroupTiles,
        context: LayerContext,
    ) -> jax.Array:  # f[places, intermediate]
        """The input of `down_proj`."""
        gate = self.gate_proj(chosen, tiles, context)
        return self.join(gate, self.up_proj(chosen, tiles, context))

    def join(self, gate: jax.Array, up: jax.Array) -> jax.Array:  # f[places, intermediate]
        """The input of `down_proj`, from the outputs of `gate_proj` and `up_proj`."""
        return activate(gate, self.activation) * up

    def finish(self, down: jax.Array) -> jax.Array:  # f[places, hidden]
        """The outputs of experts before they are weighted, from the outputs of `down_proj`."""
        return down


class PlainExperts(Experts):
    """Experts without a gate: `down(activation(up(x)))`."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(
            num_experts, hidden_size, intermediate_size, activation=activation, dtype=dtype
        )
        del self.gate_proj

    def inner(
        self,
        chosen: jax.Array,  # f[places, hidden]
        tiles: GroupTiles,
        context: LayerContext,
    ) -> jax.Array:  # f[places, intermediate]
        return activate(self.up_proj(chosen, tiles, context), self.activation)


def choices_of_used_rows(
    expert_ids: jax.Array,  # i32[num_rows, top_k], in [0, num_experts)
    num_experts: int,
    context: LayerContext,
) -> jax.Array:  # i32[num_rows, top_k], in [0, num_experts]
    """The same ids, except that padding rows choose expert `num_experts`, which does not exist.

    A choice is one row going through one expert.
    """
    return jnp.where(context.is_used()[:, None], expert_ids, num_experts)


def tiles_of_choices(
    choices: jax.Array,  # i32[num_rows, top_k], in [0, num_experts]
    num_experts: int,
    context: LayerContext,
) -> GroupTiles:
    """Sorts choices into tiles by their expert. Choice c of row r is number `r * top_k + c`."""
    return make_group_tiles(
        choices.reshape(-1),
        num_groups=num_experts,
        tile_rows=context.kernels.tile_rows(choices.size, num_experts),
    )


def sum_of_choices(
    outputs: jax.Array,  # f[num_tiles * tile_rows, width]
    places: jax.Array,  # i32[num_rows * top_k], as in `GroupTiles`
    weights: jax.Array,  # f32[num_rows, top_k]
) -> jax.Array:  # f32[num_rows, width]
    """The weighted sum of the outputs of each row's choices. Choices without a place add zero."""
    num_rows, top_k = weights.shape
    # Adds one choice after the other, so that the order is the same in every batch.
    places = places.reshape(num_rows, top_k)
    total = jnp.zeros((num_rows, outputs.shape[1]), jnp.float32)
    for choice in range(top_k):
        own = outputs.at[places[:, choice]].get(mode="fill", fill_value=0)
        total += own.astype(jnp.float32) * weights[:, choice, None]
    return total


def _sum_of_devices(
    outputs: jax.Array,  # f[num_devices * num_tiles * tile_rows, width]
    places: jax.Array,  # i32[num_rows * top_k], the same on all devices or of each
    weights: jax.Array,  # f32[num_rows, top_k]
    kernels: KernelSettings,
) -> jax.Array:  # f32[num_rows, width]
    """As `sum_of_choices`, of outputs of which each device has a part."""

    def add(outputs: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.psum(sum_of_choices(outputs, places, weights), MODEL_AXIS)

    places_spec = BY_DEVICE if kernels.splits_experts else WHOLE
    return kernels.by_device(
        *(add, outputs, places, weights),
        in_specs=(BY_DEVICE, places_spec, WHOLE),
        out_specs=WHOLE,
    )


def make_experts(config: MoEConfig, *, dtype: jnp.dtype) -> Experts:
    """The experts of one layer, without biases, with the sizes in the config."""
    return Experts(
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        activation=config.hidden_act,
        dtype=dtype,
    )


def packed_gate_up_rules(
    rules: dict[str, WeightRule],
    *,
    is_interleaved: bool = False,
    is_turned: bool = False,
) -> dict[str, WeightRule]:
    """The rules for checkpoints that pack all experts of a layer into two tensors.

    `experts.gate_up_proj` holds gate and up, and `experts.down_proj` holds down.

    Args:
        rules: The rules of all parameters of a model. The result replaces the rules of experts.
        is_interleaved: Rows of gate and up alternate in the tensor. Otherwise all rows of gate come
            first.
        is_turned: The checkpoint has [num_experts, in, out] instead of [num_experts, out, in].
    """
    return {
        name: _packed_rule(rule, is_interleaved, is_turned) if rule.layout == "experts" else rule
        for name, rule in rules.items()
    }


def packed_or_single_rules(rules: dict[str, WeightRule]) -> dict[str, WeightRule]:
    """The rules for families whose checkpoints store experts in one of two forms.

    Either they pack all experts of a layer (`packed_gate_up_rules`), as Qwen3.5 does on the hub, or
    they have a tensor for each expert, as transformers writes.
    """
    packed = packed_gate_up_rules(rules)
    return {
        name: _either_rule(packed[name], rule) if rule.layout == "experts" else rule
        for name, rule in rules.items()
    }


def _either_rule(packed: WeightRule, single: WeightRule) -> WeightRule:
    sources = tuple(
        dataclasses.replace(source, is_optional=True)
        for source in (*packed.sources, *single.sources)
    )

    def combine(weights_np: list[np.ndarray]) -> np.ndarray:
        if len(weights_np) == 1 and weights_np[0].ndim == 3:
            return packed.combine(weights_np)
        if len(weights_np) != len(single.sources):
            raise WeightMismatchError(
                f"the checkpoint has {len(weights_np)} of the {len(single.sources)} tensors "
                f"{single.sources[0].name} and so on. Use config.json and weights of the same "
                "release."
            )
        return single.combine(weights_np)

    return dataclasses.replace(single, sources=sources, combine=combine)


def _packed_rule(rule: WeightRule, is_interleaved: bool, is_turned: bool) -> WeightRule:
    # "model.layers.0.mlp.experts.0.gate_proj.weight"
    owner, _, local = rule.sources[0].name.removesuffix(".weight").rpartition(".")
    owner = owner.removesuffix(".0")
    out_features, in_features = rule.sources[0].shape
    is_down = local == "down_proj"
    shape = (len(rule.sources), out_features if is_down else 2 * out_features, in_features)
    packed = local if is_down else "gate_up_proj"
    source = Source(
        name=f"{owner}.{packed}", shape=(shape[0], shape[2], shape[1]) if is_turned else shape
    )

    def combine(weights_np: list[np.ndarray]) -> np.ndarray:
        (weight_np,) = weights_np
        weight_np = weight_np.swapaxes(-1, -2) if is_turned else weight_np
        if is_down:
            return weight_np
        start = int(local == "up_proj")
        if is_interleaved:
            return weight_np[:, start::2]
        return weight_np[:, start * out_features :][:, :out_features]

    return dataclasses.replace(rule, sources=(source,), combine=combine)
