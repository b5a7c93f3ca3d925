"""Tiles of states in pages, for Mosaic GPU kernels that advance states by one token on Hopper.

Each head has a matrix as its state, whose lines lie in the pages one after the other. A CTA loads
one tile of a head's state from the pages to registers, advances it, and stores it to the pages. So
device memory is read once and written once. The loads of a tile do not wait for each other.
Several CTAs share an SM, so that some load while others compute or store.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        """Lines of a run: as many neighboring lines as a kernel may load together.

        Runs of this many lines divide a head, and no page boundary cuts one.
        """
        return math.gcd(self.lines_per_page, self.num_lines, self.first_line)


def state_misfit(
    states: PagedStates, shape: tuple[int, int, int], *, min_lines: int = MIN_LINES
) -> str | None:
    """The reason why a kernel cannot advance states of a shape by tiles; None if it can.

    Args:
        min_lines: The kernel loads runs of at least this many neighboring lines.
    """
    num_heads, num_lines, line_size = shape
    if not states.num_reqs or not num_heads:
        return "there is nothing to compute"
    if states.dtype not in _DTYPES:
        return f"states must be of {', '.join(_DTYPES)}, got {states.dtype}"
    if line_size % TILE_COLUMNS or num_lines % min_lines:
        return (
            f"a head's state must be a multiple of {min_lines} x {TILE_COLUMNS}, got "
            f"{num_lines} x {line_size}"
        )
    if states.numbers_per_page % line_size or states.first_number % line_size:
        return (
            f"pages must hold whole lines of {line_size} numbers, got pages of "
            f"{states.numbers_per_page} with {states.first_number} before the state"
        )
    plan = StatePlan.of(states, shape)
    if plan.lines_together % min_lines:
        return (
            f"a page, and what lies before the state, must be multiples of {min_lines} lines, got "
            f"{plan.lines_per_page} and {plan.first_line}"
        )
    if math.prod(states.pages.shape[:2]) * plan.lines_per_page > INT32_MAX:
        return "indices are int32"
    if states.num_reqs > MAX_GRID_YZ:
        return f"the grid has at most {MAX_GRID_YZ} requests"
    return None


class StateRefs(NamedTuple):
    """The arrays of `PagedStates` in GMEM (device memory), as a kernel sees them."""

    row: jax.Ref  # i32[1]
    read_blocks: jax.Ref  # i32[num_reqs, pages_per_state]
    write_blocks: jax.Ref  # i32[num_reqs, pages_per_state]
    starts_from_zero: jax.Ref  # i32[num_reqs]
    lines: jax.Ref  # [num_rows * num_blocks * lines_per_page, line_size], which the kernel writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cta:
    """One CTA of a kernel. It advances one piece of one head's state of one request."""

    refs: StateRefs
    plan: StatePlan
    req: jax.Array
    head: jax.Array
    piece: jax.Array

    @property
    def is_written(self) -> jax.Array:  # bool[]
        """Whether the request writes its state. If not, the kernel reads none of its blocks."""
        return self.refs.write_blocks[self.req, 0] < self.plan.num_blocks

    def tile(self, first_line: jax.Array | int, num_lines: int, columns: pl.Slice) -> "Tile":
        """A tile of neighboring lines of the head."""
        size = math.gcd(self.plan.lines_together, num_lines)
        return Tile(
            cta=self,
            first_lines=[first_line + offset for offset in range(0, num_lines, size)],
            lines_per_run=size,
            columns=columns,
            layout=self.plan.layout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Some lines and columns of a head's state, which one CTA advances.

    The lines form runs, which no page boundary cuts (`StatePlan.lines_together`). `load` returns an
    array for each run, and `store` takes these arrays.
    """

    cta: Cta
    first_lines: Sequence[jax.Array | int]  # the first line of each run, counted within the head
    lines_per_run: int
    columns: pl.Slice
    layout: plgpu.Layout  # of the registers of a run

    def load(self) -> list[jax.Array]:  # f32[lines_per_run, num_columns] each
        """The tile before the step."""
        refs = self.cta.refs
        places = self._places(refs.read_blocks)
        # JAX 0.11 has no optimized read from GMEM. All loads start before the first result is used.
        runs = [plgpu.load(place, layout=self.layout, optimized=False) for place in places]
        # `where` instead of a factor, because memory that was never written may hold NaN.
        is_zero = lax.broadcast(refs.starts_from_zero[self.cta.req] > 0, runs[0].shape)
        zeros = jnp.zeros(runs[0].shape, jnp.float32)
        return [jnp.where(is_zero, zeros, run.astype(jnp.float32)) for run in runs]

    def store(self, runs: Sequence[jax.Array]) -> None:
        """Writes the tile after the step, in the order of `load`."""
        refs = self.cta.refs
        for place, run in zip(self._places(refs.write_blocks), runs, strict=True):
            store_to_gmem(place, run.astype(refs.lines.dtype))

    def _places(self, blocks: jax.Ref) -> list[jax.Ref]:
        refs, plan = self.cta.refs, self.cta.plan
        start = plan.first_line + self.cta.head * plan.num_lines
        pages_of_row = refs.row[0] * plan.num_blocks
        places = []
        for first_line in self.first_lines:
            page = lax.div(start + first_line, jnp.int32(plan.lines_per_page))
            line = lax.rem(start + first_line, jnp.int32(plan.lines_per_page))
            first = (pages_of_row + blocks[self.cta.req, page]) * plan.lines_per_page + line
            places.append(refs.lines.at[pl.ds(first, self.lines_per_run), self.columns])
        return places


def advance_tiles(
    step: Callable[..., None],
    states: PagedStates,
    tokens: Sequence[jax.Array],
    out: jax.ShapeDtypeStruct,
    *,
    plan: StatePlan,
    num_heads: int,
    pieces_per_head: int,
    kernel_name: str,
    interpret: bool | plgpu.InterpretGPUParams,
    scratch_bytes: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel with one CTA for each request, head and piece.

    Args:
        step: The function that each CTA runs. Its arguments are the `Cta`, a ref of each array in
            `tokens`, and a ref of the results. All refs are in GMEM.
        tokens: Arrays that the step needs besides the states.
        out: Shape and dtype of the results.
        pieces_per_head: CTAs that share a head's state of one request.
        scratch_bytes: Shared memory through which warps exchange parts of sums.

    Returns:
        The pages after the step, and the results.
    """

    def body(*refs: jax.Ref) -> None:
        *token_refs, row, read_blocks, write_blocks, starts_from_zero, lines, out_ref = refs
        head_and_piece, num_pieces = lax.axis_index("head_and_piece"), jnp.int32(pieces_per_head)
        cta = Cta(
            refs=StateRefs(row, read_blocks, write_blocks, starts_from_zero, lines),
            plan=plan,
            req=lax.axis_index("request"),
            head=lax.div(head_and_piece, num_pieces),
            piece=lax.rem(head_and_piece, num_pieces),
        )
        step(cta, *token_refs, out_ref)

    kernel = plgpu.kernel(
        body,
        out_type=out,
        grid=(states.num_reqs, num_heads * pieces_per_head),
        grid_names=("request", "head_and_piece"),
        kernel_name=kernel_name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=scratch_bytes,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    # A kernel writes in place only to a ref.
    lines = jax.new_ref(states.numbers.reshape(-1, plan.line_size))
    results = kernel(
        *tokens,
        jnp.asarray(states.row, jnp.int32).reshape(1),
        states.read_blocks,
        states.write_blocks,
        states.starts_from_zero.astype(jnp.int32),
        lines,
    )
    numbers = jax.freeze(lines).reshape(*states.pages.shape[:2], -1)
    return states.with_numbers(numbers).pages, results


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
