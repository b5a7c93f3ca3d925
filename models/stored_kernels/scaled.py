"""`ScaledKernel`: numbers of 4 or 8 bits with scales, widened in every product."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from models.forward.kernel_settings import ExpertSplit, KernelSettings, MatrixSplit
from models.layers.product import dot_float32
from models.stored_kernels.few_rows import MAX_FEW_ROWS, multiply_few_rows
from models.stored_kernels.panels import Panels
from models.stored_kernels.stored_kernel import StoredKernel, UseKernel
from models.weight_rule import SplitAxis, split_spec
from pallas_kernels import GroupTiles
from pallas_kernels.number_format import MAX_E4M3, MIDDLE, NumberFormat, has_pairs

# What floats are rounded to.
RoundedFormat = Literal["int4", "int8", "e4m3"]
# Smaller groups would need more bytes for scales than they save.
MIN_GROUP_SIZE = 16
# Widths of panels are multiples of this, so that vector instructions work on whole rows.
_WIDTH_STEP = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ScaledKernel(StoredKernel):
    """Implements `StoredKernel`. Numbers of one output and one group of inputs share a scale.

    Activations are not rounded: x is multiplied by the widened matrix, in its own dtype. A loop
    widens one panel of columns at a time. On a CPU, a panel stays in the processor's cache, so that
    only the stored bits are read from memory. One or two rows of float32 are multiplied in another
    order there (`multiply_few_rows`).

    A byte holds two numbers of 4 bits: row r of a group in its low bits, and row
    `r + group_size / 2` in its high bits. Stacks have one axis more, of experts, in front.
    """

    # u8[num_panels, num_groups, group_size / 2, width] with 4 bits, or
    # u8 (i8 if integers) [num_panels, num_groups, group_size, width] with 8.
    numbers: jax.Array
    # f32[num_panels, num_groups, width], or u8 if all are powers of two (`scales_as_float32`)
    scales: jax.Array
    # u8[num_panels, num_groups, width], of int4 only; None: 8 for int4
    zeros: jax.Array | None
    number_format: NumberFormat = field(metadata={"static": True})
    out_features: int = field(metadata={"static": True})
    # How a mesh splits a matrix (`on_mesh`); None for stacks of experts.
    split: MatrixSplit | None = field(default=None, metadata={"static": True})

    @classmethod
    def quantize(
        cls,
        values: jax.Array,  # f[in_features, out_features] or f[num_experts, ...]
        *,
        number_format: RoundedFormat,
        group_size: int,
        panel_width: int | None,
    ) -> "ScaledKernel":
        """Rounds floats to the nearest numbers, with one scale for each group and output.

        Args:
            group_size: As from `fitting_group_size`.
            panel_width: As in `pack`.
        """
        numbers, scales = _quantize(values, number_format, group_size, panel_width)
        return cls(numbers, scales, None, number_format, values.shape[-1])

    @classmethod
    def pack(
        cls,
        numbers: jax.Array,  # u8 or i8[..., num_groups, group_size, out_features]
        scales: jax.Array,  # f32 or u8[..., num_groups, out_features]
        zeros: jax.Array | None,  # u8[..., num_groups, out_features]
        *,
        number_format: NumberFormat,
        panel_width: int | None,
    ) -> "ScaledKernel":
        """Stores numbers as they are.

        Args:
            numbers: The integers or the bits of floats. One of 4 bits has a byte of its own.
            panel_width: The widest panel; None keeps all columns together.
        """
        packed = _pack(numbers, scales, zeros, number_format, panel_width)
        return cls(*packed, number_format, numbers.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, _, num_groups, num_rows, _ = self.numbers.shape
        rows_per_byte = 2 if has_pairs(self.number_format) else 1
        return *experts, num_groups * num_rows * rows_per_byte, self.out_features

    @property
    def product_dtype(self) -> jnp.dtype:
        """Of float32 activations; XLA chooses products by it."""
        return jnp.dtype(jnp.float32)

    @staticmethod
    def width_of_panels(out_features: int, panel_width: int | None) -> int:
        """The width of the panels: the narrowest with which as few panels as possible suffice.

        Args:
            panel_width: As in `pack`.
        """
        if panel_width is None or out_features <= panel_width:
            return out_features
        num_panels = -(-out_features // panel_width)
        return -(-out_features // (num_panels * _WIDTH_STEP)) * _WIDTH_STEP

    @property
    def num_panels(self) -> int:
        return self.numbers.shape[-4]

    @property
    def panels(self) -> Panels:
        """The arrays."""
        return Panels(self.numbers, self.scales, self.zeros, self.number_format)

    def specs(self, axes: Sequence[SplitAxis | None]) -> tuple[PartitionSpec, ...]:
        """A kernel of several panels is whole on every device, as its widths may differ."""
        num_arrays = 2 if self.zeros is None else 3
        if self.num_panels > 1:
            return (PartitionSpec(),) * num_arrays
        *experts, inputs, outputs = axes
        numbers = split_spec((*experts, None, inputs, None, outputs))
        return numbers, *(split_spec((*experts, None, inputs, outputs)),) * (num_arrays - 1)

    def on_mesh(self, axes: Sequence[SplitAxis | None]) -> "ScaledKernel":
        if self.num_panels > 1 or len(axes) > 2 or not any(axes):
            return self
        inputs, _ = axes
        return dataclasses.replace(self, split="out" if inputs is None else "in")

    def multiply(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        settings: KernelSettings,
        use: UseKernel,
    ) -> jax.Array:  # f32[num_rows, out_features]
        return self._multiply_panels(x, settings, use, first_panel=0)

    def multiply_one(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        matrix_idx: jax.Array | int,
        settings: KernelSettings,
    ) -> jax.Array:  # f32[num_rows, out_features]
        flat = self._flat()
        return self._multiply_panels(
            *(x, settings, lambda function, operand: function(operand, flat)),
            first_panel=matrix_idx * self.num_panels,
        )

    def _multiply_panels(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        settings: KernelSettings,
        use: UseKernel,
        *,
        first_panel: jax.Array | int,
    ) -> jax.Array:  # f32[num_rows, out_features]
        """The product with the panels of one matrix.

        Args:
            use: As in `multiply`. The kernel is flat (`_flat`).
            first_panel: The index of the matrix's first panel among those of the kernel.
        """

        def panel(idx: jax.Array | int) -> Panels:
            return use(lambda idx, kernel: kernel._panel(idx), first_panel + idx)

        if self.num_panels == 1:
            own = panel(0)
            return settings.scaled_matmul(
                *(x, own.numbers, own.scales, own.zeros),
                number_format=own.number_format,
                split=self.split,
            )
        if len(x) <= MAX_FEW_ROWS and x.dtype == jnp.float32:
            sizes = {"first_panel": first_panel, "num_panels": self.num_panels}
            return multiply_few_rows(x, self._flat().panels, use, **sizes)[:, : self.out_features]
        width = self.numbers.shape[-1]

        def add(idx: jax.Array, out: jax.Array) -> jax.Array:
            return _update(out, dot_float32(x, panel(idx).widen(x.dtype)), 0, idx * width)

        out = jnp.zeros((x.shape[0], self.num_panels * width), jnp.float32)
        return lax.fori_loop(0, self.num_panels, add, out)[:, : self.out_features]

    def columns(
        self,
        column_ids: jax.Array,  # i32[num_columns]
        dtype: jnp.dtype,
    ) -> jax.Array:  # dtype[in_features, num_columns]
        panel_ids, places = jnp.divmod(column_ids, self.numbers.shape[-1])

        def of_array(array: jax.Array) -> jax.Array:
            chosen = array.at[panel_ids, ..., places]
            chosen = chosen.get(mode="promise_in_bounds", wrap_negative_indices=False)
            return jnp.moveaxis(chosen, 0, -1)

        return jax.tree.map(of_array, self.panels).widen(dtype)

    def multiply_groups(
        self,
        x: jax.Array,  # f[num_tiles * tile_rows, in_features]
        tiles: GroupTiles,
        settings: KernelSettings,
        use: UseKernel,
        *,
        split: ExpertSplit,
    ) -> jax.Array:  # f[num_tiles * tile_rows, out_features]
        if self.num_panels > 1:
            return self._multiply_tiles(x, tiles.groups, use)[:, : self.out_features]

        def multiply(x: jax.Array, kernel: ScaledKernel) -> jax.Array:
            # Without the axis of panels.
            own = jax.tree.map(lambda array: array[:, 0], kernel.panels)
            return settings.scaled_grouped_matmul(
                *(x, own.numbers, own.scales, own.zeros, tiles),
                number_format=own.number_format,
                split=split,
            )

        return use(multiply, x)

    def _multiply_tiles(
        self,
        x: jax.Array,  # f[num_tiles * tile_rows, in_features]
        groups: jax.Array,  # i32[num_tiles]
        use: UseKernel,
    ) -> jax.Array:  # f[num_tiles * tile_rows, num_panels * width]
        num_experts, num_panels, width = *self.numbers.shape[:2], self.numbers.shape[-1]
        tile_rows = x.shape[0] // groups.shape[0]
        num_used = (groups < num_experts).sum(dtype=jnp.int32)

        def add(turn: jax.Array, out: jax.Array) -> jax.Array:
            tile_idx, panel_idx = turn // num_panels, turn % num_panels
            start = tile_idx * tile_rows
            tile = lax.dynamic_slice_in_dim(x, start, tile_rows, allow_negative_indices=False)
            panel = use(
                lambda idx, kernel: kernel._panel_of(idx), groups[tile_idx] * num_panels + panel_idx
            )
            columns = dot_float32(tile, panel.widen(x.dtype)).astype(x.dtype)
            return _update(out, columns, start, panel_idx * width)

        out = jnp.zeros((x.shape[0], num_panels * width), x.dtype)
        return lax.fori_loop(0, num_used * num_panels, add, out)

    def _panel(self, panel_idx: jax.Array | int) -> Panels:
        """A panel of a matrix."""
        return jax.tree.map(
            lambda array: lax.dynamic_index_in_dim(
                array, panel_idx, keepdims=False, allow_negative_indices=False
            ),
            self.panels,
        )

    def _panel_of(self, idx: jax.Array) -> Panels:
        """A panel of a stack: `idx` counts the panels of all experts."""
        return self._flat()._panel(idx)

    def _flat(self) -> "ScaledKernel":
        """A stack as one matrix with the panels of all its matrices. A matrix stays as it is."""
        num_axes = self.numbers.ndim - 4
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[num_axes + 1 :]), self)


def fitting_group_size(in_features: int, group_size: int) -> int | None:
    """The largest size that divides the inputs and `group_size`; None if it is too small."""
    fitting = math.gcd(in_features, group_size)
    return fitting if fitting >= MIN_GROUP_SIZE and fitting % 2 == 0 else None


def _update(out: jax.Array, part: jax.Array, row: jax.Array | int, column: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(out, part, (row, column), allow_negative_indices=False)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(
    values: jax.Array, number_format: RoundedFormat, group_size: int, panel_width: int | None
) -> tuple[jax.Array, jax.Array]:
    def of_matrix(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        groups = matrix.astype(jnp.float32).reshape(-1, group_size, matrix.shape[1])
        if number_format != "int4":
            largest = 127 if number_format == "int8" else MAX_E4M3
            scales = jnp.abs(groups).max(axis=1) / largest
        else:
            # The number furthest from zero is -8, whatever its sign; so all 16 numbers are used.
            largest, smallest = groups.max(axis=1), groups.min(axis=1)
            scales = jnp.where(largest > -smallest, largest, smallest) / -MIDDLE
        steps = jnp.where(scales == 0, 1.0, scales)[:, None]
        numbers = groups / steps
        match number_format:
            case "int4":
                numbers = jnp.minimum(jnp.round(numbers), MIDDLE - 1) + MIDDLE
                numbers = numbers.astype(jnp.uint8)
            case "int8":
                numbers = jnp.round(numbers).astype(jnp.int8)
            case "e4m3":
                numbers = lax.bitcast_convert_type(numbers.astype(jnp.float8_e4m3fn), jnp.uint8)
        numbers, scales, _ = _pack(numbers, scales, None, number_format, panel_width)
        return numbers, scales

    # One expert after the other needs less memory.
    return of_matrix(values) if values.ndim == 2 else lax.map(of_matrix, values)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _pack(
    numbers: jax.Array,  # u8 or i8[..., num_groups, group_size, out_features]
    scales: jax.Array,  # f32 or u8[..., num_groups, out_features]
    zeros: jax.Array | None,
    number_format: NumberFormat,
    panel_width: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    if has_pairs(number_format):
        low, high = jnp.split(numbers, 2, axis=-2)
        numbers = low | high << 4
    width = ScaledKernel.width_of_panels(numbers.shape[-1], panel_width)

    def cut(array: jax.Array, num_axes: int) -> jax.Array:
        num_panels = -(-array.shape[-1] // width)
        missing = num_panels * width - array.shape[-1]
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
        array = array.reshape(*array.shape[:-1], num_panels, width)
        return jnp.moveaxis(array, -2, -1 - num_axes)

    return cut(numbers, 3), cut(scales, 2), None if zeros is None else cut(zeros, 2)
