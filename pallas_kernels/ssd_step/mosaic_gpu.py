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
    Cta,
    StatePlan,
    advance_tiles,
    load_columns,
    load_lines,
    over_columns,
    over_lines,
    state_misfit,
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
    num_heads, head_dim = x.shape[1:]
    plan = StatePlan.of(states, (num_heads, head_dim, b.shape[2]))
    lines_per_cta = _lines_per_cta(plan)
    decay = jnp.exp(log_decay.astype(jnp.float32))
    return advance_tiles(
        functools.partial(_step, lines_per_cta=lines_per_cta),
        states,
        [array.astype(jnp.float32) for array in (x, b, c, decay)],
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        plan=plan,
        num_heads=num_heads,
        pieces_per_head=head_dim // lines_per_cta,
        kernel_name="ssd_step",
        interpret=interpret,
    )


def _lines_per_cta(plan: StatePlan) -> int:
    """Lines of a CTA's tile: a multiple of `lines_at_a_time` that divides the lines of a head."""
    step = plan.lines_at_a_time
    wanted = max(1, _WANTED_NUMBERS // (plan.line_size * step))
    num_steps = plan.num_lines // step
    return step * max(n for n in range(1, wanted + 1) if num_steps % n == 0)


def _step(
    cta: Cta,
    x: jax.Ref,  # f32[num_reqs, num_heads, head_dim]
    b: jax.Ref,  # f32[num_reqs, num_groups, state_size]
    c: jax.Ref,  # f32[num_reqs, num_groups, state_size]
    decay: jax.Ref,  # f32[num_reqs, num_heads]
    out: jax.Ref,  # f32[num_reqs, num_heads, head_dim]
    *,
    lines_per_cta: int,
) -> None:
    plan, req, head = cta.plan, cta.req, cta.head
    first_line = cta.piece * lines_per_cta
    group = lax.div(head, jnp.int32(x.shape[1] // b.shape[1]))

    @pl.when(cta.is_written)
    def _() -> None:
        tile = cta.tile(first_line, lines_per_cta, pl.ds(0, plan.line_size))
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

    @pl.when(jnp.logical_not(cta.is_written))
    def _() -> None:
        nothing = plgpu.layout_cast(jnp.zeros((lines_per_cta,), jnp.float32), plan.layout.reduce(1))
        store_to_gmem(out.at[req, head, pl.ds(first_line, lines_per_cta)], nothing)
