"""Tiles of states in pages, for Mosaic GPU kernels that advance states by one token on Hopper.

Each head has a matrix as its state, whose lines lie in the pages one after the other. A CTA loads
one tile of a head's state from the pages to registers, advances it, and stores it to the pages. So
device memory is read once and written once. The loads of a tile do not wait for each other.
Several CTAs share an SM, so that some load while others compute or store.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_layout import INT32_MAX
from pallas_kernels.paged_states import PagedStates
from pallas_kernels.tma_boxes import MAX_GRID_YZ

TILE_COLUMNS = 32  # 128 bytes in float32
# Lines that the four warps of a CTA load at a time. With 16, eight threads load a line, four
# neighbors each. With 4, a warp loads a line, which takes more instructions. This is for pages that
# cut runs of 16 lines.
_LINES_AT_A_TIME = (16, 4)
MIN_LINES = min(_LINES_AT_A_TIME)
_DTYPES = ("float32", "bfloat16", "float16")
# A thread holds 64 numbers of the largest tile. It can have at most 255 registers.
MAX_TILE_NUMBERS = 64 * 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """How the states `[num_heads, num_lines, line_size]` lie in pages that hold whole lines."""

    num_blocks: int
    num_lines: int  # of a head
    line_size: int
    lines_per_page: int
    first_line: int  # of the state in its first page

    @classmethod
    def of(cls, states: PagedStates, shape: tuple[int, int, int]) -> "StatePlan":
        _, num_lines, line_size = shape
        return cls(
            num_blocks=states.pages.shape[1],
            num_lines=num_lines,
            line_size=line_size,
            lines_per_page=states.numbers_per_page // line_size,
            first_line=states.first_number // line_size,
        )

    @property
    def lines_at_a_time(self) -> int:
        return next((n for n in _LINES_AT_A_TIME if self.lines_together % n == 0), MIN_LINES)

    @property
    def layout(self) -> plgpu.Layout:
        """The registers of a tile."""
        whole = (self.lines_at_a_time, TILE_COLUMNS)
        if self.lines_at_a_time == MIN_LINES:
            tiling = plgpu.Tiling((whole, (1,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        tiling = plgpu.Tiling((whole, (4, TILE_COLUMNS), (4,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    @property
    def lines_together(self) -> int:
        """The most lines per run so that runs divide a head, and no page boundary cuts a run."""
        return math.gcd(self.lines_per_page, self.num_lines, self.first_line)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRefs:
    """The arrays of `state_operands` in GMEM."""

    row: jax.Ref  # i32[1]
    read_blocks: jax.Ref  # i32[num_reqs, pages_per_state]
    write_blocks: jax.Ref  # i32[num_reqs, pages_per_state]
    starts_from_zero: jax.Ref  # i32[num_reqs]
    lines: jax.Ref  # [num_rows * num_blocks * lines_per_page, line_size]


def state_misfit(states: PagedStates, shape: tuple[int, int, int]) -> str | None:
    """Why a kernel cannot advance states of a shape by tiles; None if it can."""
    num_heads, num_lines, line_size = shape
    if not states.num_reqs or not num_heads:
        return "there is nothing to compute"
    if states.dtype not in _DTYPES:
        return f"states must be of {', '.join(_DTYPES)}, got {states.dtype}"
    if line_size % TILE_COLUMNS or num_lines % MIN_LINES:
        return (
            f"a head's state must be a multiple of {MIN_LINES} x {TILE_COLUMNS}, got "
            f"{num_lines} x {line_size}"
        )
    if states.numbers_per_page % line_size or states.first_number % line_size:
        return (
            f"pages must hold whole lines of {line_size} numbers, got pages of "
            f"{states.numbers_per_page} with {states.first_number} before the state"
        )
    plan = StatePlan.of(states, shape)
    if plan.lines_together % MIN_LINES:
        return (
            f"a page, and what lies before the state, must be multiples of {MIN_LINES} lines, got "
            f"{plan.lines_per_page} and {plan.first_line}"
        )
    if math.prod(states.pages.shape[:2]) * plan.lines_per_page > INT32_MAX:
        return "indices are int32"
    if states.num_reqs > MAX_GRID_YZ:
        return f"the grid has at most {MAX_GRID_YZ} requests"
    return None


def state_operands(states: PagedStates, plan: StatePlan) -> tuple[list[jax.Array], jax.Ref]:
    """The arrays of `StateRefs`, in order; the last is a new ref, which the kernel writes."""
    indices = [
        jnp.asarray(states.row, jnp.int32).reshape(1),
        states.read_blocks,
        states.write_blocks,
        states.starts_from_zero.astype(jnp.int32),
    ]
    return indices, jax.new_ref(states.numbers.reshape(-1, plan.line_size))


def freeze_pages(states: PagedStates, lines: jax.Ref) -> jax.Array:
    """The pages, with what the kernel wrote to the ref of `state_operands`."""
    numbers = jax.freeze(lines).reshape(*states.pages.shape[:2], -1)
    return states.with_numbers(numbers).pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Some lines and columns of a head's state, of one request, in a kernel.

    The lines lie in runs that no page boundary cuts (`StatePlan.lines_together`). `load` returns a
    list of these runs, and `store` takes one.
    """

    refs: StateRefs
    plan: StatePlan
    req: jax.Array
    head: jax.Array
    first_line: jax.Array | int  # of the tile in the head
    num_lines: int
    columns: pl.Slice

    @property
    def is_written(self) -> jax.Array:  # bool[]
        """Whether the request writes its state. If not, the kernel reads none of its blocks."""
        return self.refs.write_blocks[self.req, 0] < self.plan.num_blocks

    def load(self) -> list[jax.Array]:  # f32[lines_of_run, num_columns] each
        """The tile before the step."""
        places = self._places(self.refs.read_blocks)
        # JAX 0.11 has no optimized read from GMEM. All loads start before the first result is used.
        runs = [plgpu.load(place, layout=self.plan.layout, optimized=False) for place in places]
        # `where` instead of a factor, because memory that was never written may hold NaN.
        is_zero = lax.broadcast(self.refs.starts_from_zero[self.req] > 0, runs[0].shape)
        zeros = jnp.zeros(runs[0].shape, jnp.float32)
        return [jnp.where(is_zero, zeros, run.astype(jnp.float32)) for run in runs]

    def store(self, runs: Sequence[jax.Array]) -> None:
        """Writes the tile after the step, in the order of `load`."""
        for place, run in zip(self._places(self.refs.write_blocks), runs, strict=True):
            store_to_gmem(place, run.astype(self.refs.lines.dtype))

    def _places(self, blocks: jax.Ref) -> list[jax.Ref]:
        plan = self.plan
        size = math.gcd(plan.lines_together, self.num_lines)
        start = plan.first_line + self.head * plan.num_lines + self.first_line
        pages_of_row = self.refs.row[0] * plan.num_blocks
        places = []
        for offset in range(0, self.num_lines, size):
            page = lax.div(start + offset, jnp.int32(plan.lines_per_page))
            line = lax.rem(start + offset, jnp.int32(plan.lines_per_page))
            first = (pages_of_row + blocks[self.req, page]) * plan.lines_per_page + line
            places.append(self.refs.lines.at[pl.ds(first, size), self.columns])
        return places


def store_to_gmem(ref: jax.Ref, value: jax.Array) -> None:
    """Stores registers straight to device memory.

    TODO: drop when JAX >= 0.12. Older versions have no `plgpu.store` and allow such stores.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def load_lines(ref: jax.Ref, plan: StatePlan) -> jax.Array:
    """One number for each line of a tile, f32[num_lines]."""
    return plgpu.load(ref, layout=plan.layout.reduce(1), optimized=False)


def load_columns(ref: jax.Ref, plan: StatePlan) -> jax.Array:
    """One number for each column of a tile, f32[num_columns]."""
    return plgpu.load(ref, layout=plan.layout.reduce(0), optimized=False)


def over_lines(columns: jax.Array, num_lines: int) -> jax.Array:
    """f32[num_columns] -> f32[num_lines, num_columns]."""
    return lax.broadcast_in_dim(columns, (num_lines, columns.shape[0]), [1])


def over_columns(lines: jax.Array, num_columns: int) -> jax.Array:
    """f32[num_lines] -> f32[num_lines, num_columns]."""
    return lax.broadcast_in_dim(lines, (lines.shape[0], num_columns), [0])


def added(runs: Sequence[jax.Array]) -> jax.Array:
    """The sum of arrays of one shape."""
    return functools.reduce(jnp.add, runs)
