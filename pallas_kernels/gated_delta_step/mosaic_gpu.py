"""Mosaic GPU body of `gated_delta_step` on Hopper: a CTA advances some columns of a head.

No column of the state depends on another one, so CTAs exchange nothing. Threads exchange only the
sums over the lines of a column.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_states import PagedStates
from pallas_kernels.state_tiles import (
    MAX_TILE_NUMBERS,
    TILE_COLUMNS,
    StatePlan,
    StateRefs,
    Tile,
    added,
    freeze_pages,
    load_columns,
    load_lines,
    over_columns,
    over_lines,
    state_misfit,
    state_operands,
    store_to_gmem,
)
from pallas_kernels.tma_boxes import WARPGROUP_THREADS

# Each thread passes the sums of its lines to the other warps: four columns, so 16 bytes.
_SCRATCH_BYTES = 16 * WARPGROUP_THREADS


def misfit(
    states: PagedStates,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
) -> str | None:
    """Why the kernel cannot advance these states; None if it can."""
    del q, log_decay, beta
    num_heads, k_dim = k.shape[1:]
    if k_dim * TILE_COLUMNS > MAX_TILE_NUMBERS:
        return f"a column must have at most {MAX_TILE_NUMBERS // TILE_COLUMNS} numbers, got {k_dim}"
    return state_misfit(states, (num_heads, k_dim, v.shape[2]))


def gated_delta_step_mosaic_gpu(
    states: PagedStates,
    q: jax.Array,  # f[num_reqs, num_heads, k_dim]
    k: jax.Array,  # f[num_reqs, num_heads, k_dim]
    v: jax.Array,  # f[num_reqs, num_heads, v_dim]
    log_decay: jax.Array,  # f[num_reqs, num_heads] or f[num_reqs, num_heads, k_dim]
    beta: jax.Array,  # f[num_reqs, num_heads]
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gated_delta_step`."""
    num_reqs, num_heads, k_dim = k.shape
    v_dim = v.shape[2]
    plan = StatePlan.of(states, (num_heads, k_dim, v_dim))
    indices, lines = state_operands(states, plan)
    decay = jnp.exp(log_decay.astype(jnp.float32))
    step = plgpu.kernel(
        functools.partial(_kernel_body, plan=plan),
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        grid=(num_reqs, num_heads * (v_dim // TILE_COLUMNS)),
        grid_names=("request", "head_and_piece"),
        kernel_name="gated_delta_step",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=_SCRATCH_BYTES,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )
    tokens = (x.astype(jnp.float32) for x in (q, k, v, decay, beta))
    out = step(*tokens, *indices, lines)
    return freeze_pages(states, lines), out


def _kernel_body(
    q: jax.Ref,  # f32[num_reqs, num_heads, k_dim], in GMEM as all others
    k: jax.Ref,  # f32[num_reqs, num_heads, k_dim]
    v: jax.Ref,  # f32[num_reqs, num_heads, v_dim]
    decay: jax.Ref,  # f32[num_reqs, num_heads] or f32[num_reqs, num_heads, k_dim]
    beta: jax.Ref,  # f32[num_reqs, num_heads]
    row: jax.Ref,
    read_blocks: jax.Ref,
    write_blocks: jax.Ref,
    starts_from_zero: jax.Ref,
    lines: jax.Ref,
    out: jax.Ref,  # f32[num_reqs, num_heads, v_dim]
    *,
    plan: StatePlan,
) -> None:
    req, head_and_piece = lax.axis_index("request"), lax.axis_index("head_and_piece")
    num_pieces = jnp.int32(plan.line_size // TILE_COLUMNS)
    head = lax.div(head_and_piece, num_pieces)
    columns = pl.ds(lax.rem(head_and_piece, num_pieces) * TILE_COLUMNS, TILE_COLUMNS)
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
        first_line=0,
        num_lines=plan.num_lines,
        columns=columns,
    )

    @pl.when(tile.is_written)
    def _() -> None:
        runs = tile.load()
        size = runs[0].shape[0]

        def of_runs(ref: jax.Ref) -> list[jax.Array]:  # f32[size, num_columns] each
            parts = [ref.at[req, head, pl.ds(i * size, size)] for i in range(len(runs))]
            return [over_columns(load_lines(part, plan), TILE_COLUMNS) for part in parts]

        decays = of_runs(decay) if len(decay.shape) == 3 else [decay[req, head]] * len(runs)
        runs = [run * factors for run, factors in zip(runs, decays, strict=True)]
        products = [run * key for run, key in zip(runs, of_runs(k), strict=True)]
        remembered = added(products).sum(axis=0)
        change = beta[req, head] * (load_columns(v.at[req, head, columns], plan) - remembered)
        change = over_lines(change, size)
        # Keys are loaded twice, because a thread has no registers for them.
        runs = [run + key * change for run, key in zip(runs, of_runs(k), strict=True)]
        tile.store(runs)
        products = [run * query for run, query in zip(runs, of_runs(q), strict=True)]
        store_to_gmem(out.at[req, head, columns], added(products).sum(axis=0))

    @pl.when(jnp.logical_not(tile.is_written))
    def _() -> None:
        nothing = plgpu.layout_cast(jnp.zeros((TILE_COLUMNS,), jnp.float32), plan.layout.reduce(0))
        store_to_gmem(out.at[req, head, columns], nothing)
