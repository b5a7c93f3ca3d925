"""Mosaic GPU body of `ssd_step` on Hopper: a CTA advances some lines of a head.

No line of the state depends on another one, so CTAs exchange nothing. Threads exchange only the
sums over the numbers of a line, and all threads of a line are in one warp.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_states import PagedStates
from pallas_kernels.state_tiles import (
    MIN_LINES,
    StatePlan,
    StateRefs,
    Tile,
    freeze_pages,
    load_columns,
    load_lines,
    over_columns,
    over_lines,
    state_misfit,
    state_operands,
    store_to_gmem,
)

# Most numbers of a CTA's tile, unless the lines that are loaded at a time have more. A thread then
# holds 32 of them, so several CTAs share an SM. This value is a guess: no other was measured.
_WANTED_NUMBERS = 32 * 128


def misfit(
    states: PagedStates,
    x: jax.Array,
    b: jax.Array,
    c: jax.Array,
    log_decay: jax.Array,
) -> str | None:
    """Why the kernel cannot advance these states; None if it can."""
    del c, log_decay
    state_size = b.shape[2]
    if MIN_LINES * state_size > _WANTED_NUMBERS:
        return f"a line must have at most {_WANTED_NUMBERS // MIN_LINES} numbers, got {state_size}"
    return state_misfit(states, (*x.shape[1:], state_size))


def ssd_step_mosaic_gpu(
    states: PagedStates,
    x: jax.Array,  # f[num_reqs, num_heads, head_dim]
    b: jax.Array,  # f[num_reqs, num_groups, state_size]
    c: jax.Array,  # f[num_reqs, num_groups, state_size]
    log_decay: jax.Array,  # f[num_reqs, num_heads]
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.ssd_step`."""
    num_reqs, num_heads, head_dim = x.shape
    plan = StatePlan.of(states, (num_heads, head_dim, b.shape[2]))
    lines_per_cta = _lines_per_cta(plan)
    indices, lines = state_operands(states, plan)
    step = plgpu.kernel(
        functools.partial(_kernel_body, plan=plan, lines_per_cta=lines_per_cta),
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        grid=(num_reqs, num_heads * (head_dim // lines_per_cta)),
        grid_names=("request", "head_and_piece"),
        kernel_name="ssd_step",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    decay = jnp.exp(log_decay.astype(jnp.float32))
    tokens = (array.astype(jnp.float32) for array in (x, b, c, decay))
    out = step(*tokens, *indices, lines)
    return freeze_pages(states, lines), out


def _lines_per_cta(plan: StatePlan) -> int:
    """Lines of a CTA's tile: a multiple of `lines_at_a_time` that divides the lines of a head."""
    step = plan.lines_at_a_time
    wanted = max(1, _WANTED_NUMBERS // (plan.line_size * step))
    num_steps = plan.num_lines // step
    return step * max(n for n in range(1, wanted + 1) if num_steps % n == 0)


def _kernel_body(
    x: jax.Ref,  # f32[num_reqs, num_heads, head_dim], in GMEM as all others
    b: jax.Ref,  # f32[num_reqs, num_groups, state_size]
    c: jax.Ref,  # f32[num_reqs, num_groups, state_size]
    decay: jax.Ref,  # f32[num_reqs, num_heads]
    row: jax.Ref,
    read_blocks: jax.Ref,
    write_blocks: jax.Ref,
    starts_from_zero: jax.Ref,
    lines: jax.Ref,
    out: jax.Ref,  # f32[num_reqs, num_heads, head_dim]
    *,
    plan: StatePlan,
    lines_per_cta: int,
) -> None:
    req, head_and_piece = lax.axis_index("request"), lax.axis_index("head_and_piece")
    num_pieces = jnp.int32(plan.num_lines // lines_per_cta)
    head = lax.div(head_and_piece, num_pieces)
    first_line = lax.rem(head_and_piece, num_pieces) * lines_per_cta
    group = lax.div(head, jnp.int32(x.shape[1] // b.shape[1]))
    refs = StateRefs(
        row=row,
        read_blocks=read_blocks,
        write_blocks=write_blocks,
        starts_from_zero=starts_from_zero,
        lines=lines,
    )
    tile = Tile(
        refs=refs,
        plan=plan,
        req=req,
        head=head,
        first_line=first_line,
        num_lines=lines_per_cta,
        columns=pl.ds(0, plan.line_size),
    )

    @pl.when(tile.is_written)
    def _() -> None:
        runs = tile.load()
        size = runs[0].shape[0]
        inputs = over_lines(load_columns(b.at[req, group], plan), size)
        outputs = over_lines(load_columns(c.at[req, group], plan), size)
        factor = decay[req, head]
        parts = [pl.ds(first_line + i * size, size) for i in range(len(runs))]
        runs = [
            run * factor
            + over_columns(load_lines(x.at[req, head, part], plan), plan.line_size) * inputs
            for run, part in zip(runs, parts, strict=True)
        ]
        tile.store(runs)
        for run, part in zip(runs, parts, strict=True):
            store_to_gmem(out.at[req, head, part], (run * outputs).sum(axis=1))

    @pl.when(jnp.logical_not(tile.is_written))
    def _() -> None:
        nothing = plgpu.layout_cast(jnp.zeros((lines_per_cta,), jnp.float32), plan.layout.reduce(1))
        store_to_gmem(out.at[req, head, pl.ds(first_line, lines_per_cta)], nothing)
