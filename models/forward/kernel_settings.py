"""`KernelSettings`: how a model calls ops, on one device or over a mesh."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from models.cache.format import Pages
from models.forward.context_ranks import ContextRanks
from models.forward.forward_batch import ForwardBatch
from models.weight_rule import MODEL_AXIS, SplitAxis, is_whole

# f[num_tokens, heads, head_dim], each device with some of the heads; and the pages, each with its
# own part of every page.
TOKENS_BY_HEAD = PartitionSpec(None, MODEL_AXIS, None)
TOKENS_BY_FEATURE = PartitionSpec(None, MODEL_AXIS)  # f[num_tokens, features]
PAGES_BY_DEVICE = PartitionSpec(None, None, MODEL_AXIS)
BY_HEAD = PartitionSpec(MODEL_AXIS)  # f[heads]
BY_DEVICE = PartitionSpec(MODEL_AXIS)  # the first axis
WHOLE = PartitionSpec()

Result = TypeVar("Result")


# What is split over the devices in a product of tiles of rows with the matrices of experts:
# - out: the output features of each matrix; the features of the result are split too
# - in: the input features of each matrix, and the features of x; the results are added
# - parts: as "in", but the results are not added: the results of all devices are joined, one after
#   the other
# - experts: each device has its own experts, and tiles with their rows
ExpertSplit = Literal["in", "out", "parts", "experts"]
# As `ExpertSplit`, for a product with one matrix. Where None is allowed, it splits nothing.
MatrixSplit = Literal["in", "out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """The arguments of dispatch, and the mesh over which heads are split. Hashable, so static.

    Args:
        implementation: The body of every op; `None` means the fastest one for `target`.
        target: What programs are compiled for; `None` means JAX's default device.
        mesh: With an axis `MODEL_AXIS`; `None` means one device.
        batch_invariant: A token's attention must have the same bits in every batch.
        splits_kv_heads: Whether no two devices have keys and values of the same head.
            `LoadedModel.with_kernels` sets it.
        num_context_ranks: Devices that share the positions of a request (`ContextRanks`).
        splits_experts: Whether each device has its own experts (`models.layers.expert_parallel`).
            `LoadedModel.with_kernels` sets it.
        fuses_state_writes: As `Platform.fuses_state_writes`. `LoadedModel.with_kernels` sets it.
    """

    implementation: str | None = None
    target: pallas_kernels.Target | None = None
    mesh: Mesh | None = None
    batch_invariant: bool = False
    splits_kv_heads: bool = True
    splits_experts: bool = False
    num_context_ranks: int = 1
    fuses_state_writes: bool = False

    @classmethod
    def for_mesh(
        cls,
        mesh: Mesh,
        *,
        implementation: str | None = None,
        batch_invariant: bool = False,
        num_context_ranks: int = 1,
    ) -> "KernelSettings":
        """The settings of programs that run on a mesh of devices of one kind."""
        return cls(
            implementation=implementation,
            target=pallas_kernels.target_of(mesh.devices.flat[0]),
            mesh=mesh,
            batch_invariant=batch_invariant,
            num_context_ranks=num_context_ranks,
        )

    @property
    def num_shards(self) -> int:
        """Devices that heads are split over."""
        return 1 if self.mesh is None else self.mesh.shape[MODEL_AXIS]

    @property
    def context_ranks(self) -> ContextRanks:
        """The groups of devices that share the positions of a request."""
        return ContextRanks(num_ranks=self.num_context_ranks, num_devices=self.num_shards)

    def split_last(self, x: jax.Array, axis: SplitAxis | None) -> jax.Array:
        """`x` with its last axis split over the devices as `WeightRule` splits such an axis.

        Otherwise, the compiler would choose, and might gather a kernel instead of its output.
        """
        if self.num_shards == 1:
            return x
        is_split = not is_whole(
            axis, x.shape[-1], self.num_shards, splits_kv_heads=self.splits_kv_heads
        )
        spec = PartitionSpec(*[None] * (x.ndim - 1), MODEL_AXIS) if is_split else WHOLE
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def by_device(
        self,
        function: Callable[..., Result],
        *args: jax.Array | tuple[jax.Array | None, ...] | ForwardBatch | None,
        in_specs: tuple[PartitionSpec, ...],
        out_specs: PartitionSpec | tuple[PartitionSpec, ...],
    ) -> Result:
        """Runs `function(*args)` on each device with its own heads or features.

        Arrays of one argument are split alike.

        A kernel is opaque to the compiler, which would otherwise gather the whole cache on every
        device.
        """
        if self.num_shards == 1:
            return function(*args)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped(*args)

    def cut_features(
        self,
        x: jax.Array,  # f[num_tokens, features]
        widths: Sequence[int],
        specs: Sequence[PartitionSpec] | None = None,
    ) -> tuple[jax.Array, ...]:
        """Cuts the last axis of x into parts.

        Args:
            widths: The widths of the parts on each device.
            specs: How a mesh splits the parts, if each device has the parts of its own heads. None:
                every device has the whole x, and gets the whole parts.
        """

        def cut(x: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(jnp.split(x, np.cumsum(widths)[:-1], axis=-1))

        if specs is None:
            return cut(x)
        return self.by_device(cut, x, in_specs=(TOKENS_BY_FEATURE,), out_specs=tuple(specs))

    def on_one_device(self) -> "KernelSettings":
        """The settings of ops inside of `by_device`, which see the arrays of one device."""
        return replace(self, mesh=None)

    def slot_mapping(
        self,
        positions: jax.Array,  # i32[num_groups, num_tokens]
        block_tables: jax.Array,  # i32[num_groups, num_reqs, max_blocks_per_req]
        query_start_loc: jax.Array,  # i32[num_reqs + 1]
        *,
        block_size: int,
        num_rows: int,
        num_blocks: int,
    ) -> jax.Array:  # i32[num_groups, num_tokens]
        """The slot of every token in groups of one block size, on the devices that have the token.

        Args:
            block_size: Tokens of a block on each device.
        """
        if self.num_context_ranks > 1:
            positions = positions // self.num_context_ranks
        find_slots = functools.partial(
            pallas_kernels.slot_mapping,
            block_size=block_size,
            pad_slot=pallas_kernels.pad_slot(num_rows, num_blocks, block_size),
            implementation=self.implementation,
            target=self.target,
        )
        return self.by_device(
            *(find_slots, positions, block_tables, query_start_loc),
            in_specs=(WHOLE, WHOLE, WHOLE),
            out_specs=WHOLE,
        )

    def tile_rows(self, num_rows: int, num_groups: int) -> int:
        """Rows of a tile for `grouped_matmul`; all devices have the same tiles."""
        target = self.target or pallas_kernels.default_target()
        return pallas_kernels.choose_tile_rows(num_rows, num_groups, target)

    def grouped_matmul(
        self,
        x: jax.Array,  # f[num_tiles * tile_rows, in_features]
        weights: jax.Array,  # f or u16[num_groups, in_features, out_features]
        tiles: pallas_kernels.GroupTiles,
        *,
        split: ExpertSplit,
    ) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
        """As `pallas_kernels.grouped_matmul`; weights of uint16 are the bits of x's dtype.

        Args:
            split: See `ExpertSplit`.
        """

        def multiply(x: jax.Array, weights: jax.Array, *tiles: jax.Array) -> jax.Array:
            y = pallas_kernels.grouped_matmul(
                *(x, weights, *tiles),
                weights_dtype=x.dtype if weights.dtype == jnp.uint16 else None,
                implementation=self.implementation,
                target=self.target,
            )
            is_part = split == "in" and self.num_shards > 1
            return jax.lax.psum(y, MODEL_AXIS) if is_part else y

        matrix_axis = {"experts": 0, "in": 1, "parts": 1, "out": 2}[split]
        weights_spec = PartitionSpec(*[None] * matrix_axis, MODEL_AXIS)
        x_spec, tiles_spec, y_spec = specs_of_tiles(split)
        return self.by_device(
            *(multiply, x, weights, tiles.groups, tiles.sizes),
            in_specs=(x_spec, weights_spec, tiles_spec, tiles_spec),
            out_specs=y_spec,
        )

    def scaled_matmul(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        numbers: jax.Array,  # u8 or i8[num_groups, bytes_per_group, out_features]
        scales: jax.Array,  # f32 or u8[num_groups, out_features]
        zeros: jax.Array | None,  # u8[num_groups, out_features]
        *,
        number_format: pallas_kernels.NumberFormat,
        split: MatrixSplit | None,
    ) -> jax.Array:  # f32[num_rows, out_features]
        """As `pallas_kernels.scaled_matmul`.

        With `batch_invariant`, plain XLA computes the product: the kernel takes only few rows, so
        the bits of a row would depend on the batch.
        """

        def multiply(x: jax.Array, *matrix: jax.Array | None) -> jax.Array:
            y = pallas_kernels.scaled_matmul(
                *(x, *matrix),
                number_format=number_format,
                implementation="xla" if self.batch_invariant else self.implementation,
                target=self.target,
            )
            is_part = split == "in" and self.num_shards > 1
            return jax.lax.psum(y, MODEL_AXIS) if is_part else y

        x_spec, numbers_spec, scales_spec, y_spec = _specs_of_scaled(split)
        return self.by_device(
            *(multiply, x, numbers, scales, zeros),
            in_specs=(x_spec, numbers_spec, scales_spec, scales_spec),
            out_specs=y_spec,
        )

    def scaled_grouped_matmul(
        self,
        x: jax.Array,  # f[num_tiles * tile_rows, in_features]
        numbers: jax.Array,  # u8 or i8[num_experts, num_groups, bytes_per_group, out_features]
        scales: jax.Array,  # f32 or u8[num_experts, num_groups, out_features]
        zeros: jax.Array | None,  # u8[num_experts, num_groups, out_features]
        tiles: pallas_kernels.GroupTiles,
        *,
        number_format: pallas_kernels.NumberFormat,
        split: ExpertSplit,
    ) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
        """As `pallas_kernels.scaled_grouped_matmul`.

        Args:
            split: See `ExpertSplit`.
        """

        def multiply(x: jax.Array, *arrays: jax.Array | None) -> jax.Array:
            y = pallas_kernels.scaled_grouped_matmul(
                *(x, *arrays),
                number_format=number_format,
                implementation=self.implementation,
                target=self.target,
            )
            is_part = split == "in" and self.num_shards > 1
            return jax.lax.psum(y, MODEL_AXIS) if is_part else y

        axis = {"experts": 0, "in": 1, "parts": 1, "out": 2}[split]
        scales_spec = PartitionSpec(*[None] * axis, MODEL_AXIS)
        numbers_spec = PartitionSpec(None, None, *scales_spec[1:]) if axis == 2 else scales_spec
        x_spec, tiles_spec, y_spec = specs_of_tiles(split)
        return self.by_device(
            *(multiply, x, numbers, scales, zeros, tiles.groups, tiles.sizes),
            in_specs=(x_spec, numbers_spec, scales_spec, scales_spec, tiles_spec, tiles_spec),
            out_specs=y_spec,
        )

    def copy_blocks(
        self,
        pages: Pages,
        block_copies: jax.Array,  # i32[2, num_copies]
    ) -> Pages:
        """Copies whole blocks in every row, all sources read before any target is written.

        Args:
            block_copies: Sources and targets; a target of num_blocks or more is padding.
        """

        def copy(pages: Pages, block_copies: jax.Array) -> Pages:
            return pallas_kernels.block_copy(
                *(pages, *block_copies), implementation=self.implementation, target=self.target
            )

        return self.by_device(
            *(copy, pages, block_copies),
            in_specs=(PAGES_BY_DEVICE, WHOLE),
            out_specs=PAGES_BY_DEVICE,
        )


# For products whose callers have no settings.
PLAIN_XLA = KernelSettings(implementation="xla")


def specs_of_tiles(split: ExpertSplit) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """How x, the tiles and the result of a product with experts are split over the devices."""
    columns = PartitionSpec(None, MODEL_AXIS)
    match split:
        case "out":
            return WHOLE, WHOLE, columns
        case "in":
            return columns, WHOLE, WHOLE
        case "parts":
            return columns, WHOLE, BY_DEVICE
        case "experts":
            return BY_DEVICE, BY_DEVICE, BY_DEVICE


def _specs_of_scaled(split: MatrixSplit | None) -> tuple[PartitionSpec, ...]:
    """How x, the numbers, the scales and the result of a product are split over the devices."""
    columns = PartitionSpec(None, MODEL_AXIS)
    match split:
        case "in":
            return columns, BY_DEVICE, BY_DEVICE, WHOLE
        case "out":
            return WHOLE, PartitionSpec(None, None, MODEL_AXIS), columns, columns
        case None:
            return WHOLE, WHOLE, WHOLE, WHOLE
