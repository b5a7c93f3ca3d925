"""Mosaic GPU body of `gated_delta_step` on Hopper: a CTA advances some columns of a head.

No column of the state depends on another one, so CTAs exchange nothing. Threads exchange only the
sums over the lines of a column.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_states import PagedStates
from pallas_kernels.state_tiles import (
    MAX_TILE_NUMBERS,
    TILE_COLUMNS,
    Cta,
    StatePlan,
    added,
    advance_tiles,
    load_columns,
    load_lines,
    over_columns,
    over_lines,
    state_misfit,
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
    num_heads, k_dim, v_dim = *k.shape[1:], v.shape[2]
    decay = jnp.exp(log_decay.astype(jnp.float32))
    return advance_tiles(
        _step,
        states,
        [x.astype(jnp.float32) for x in (q, k, v, decay, beta)],
        jax.ShapeDtypeStruct(v.shape, jnp.float32),
        plan=StatePlan.of(states, (num_heads, k_dim, v_dim)),
        num_heads=num_heads,
        pieces_per_head=v_dim // TILE_COLUMNS,
        kernel_name="gated_delta_step",
        interpret=interpret,
        scratch_bytes=_SCRATCH_BYTES,
    )


def _step(
    cta: Cta,
    q: jax.Ref,  # f32[num_reqs, num_heads, k_dim]
    k: jax.Ref,  # f32[num_reqs, num_heads, k_dim]
    v: jax.Ref,  # f32[num_reqs, num_heads, v_dim]
    decay: jax.Ref,  # f32[num_reqs, num_heads] or f32[num_reqs, num_heads, k_dim]
    beta: jax.Ref,  # f32[num_reqs, num_heads]
    out: jax.Ref,  # f32[num_reqs, num_heads, v_dim]
) -> None:
    plan, req, head = cta.plan, cta.req, cta.head
    columns = pl.ds(cta.piece * TILE_COLUMNS, TILE_COLUMNS)

    @pl.when(cta.is_written)
    def _() -> None:
        tile = cta.tile(0, plan.num_lines, columns)
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

    @pl.when(jnp.logical_not(cta.is_written))
    def _() -> None:
        nothing = plgpu.layout_cast(jnp.zeros((TILE_COLUMNS,), jnp.float32), plan.layout.reduce(0))
        store_to_gmem(out.at[req, head, columns], nothing)
