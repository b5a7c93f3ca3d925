"""Mosaic GPU body of `selective_step` on Hopper: a CTA advances some channels of a group.

A thread holds all numbers of its channels' states, so threads exchange nothing.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.paged_states import PagedStates
from pallas_kernels.state_tiles import (
    MAX_TILE_NUMBERS,
    Cta,
    StatePlan,
    Tile,
    added,
    advance_tiles,
    state_misfit,
    store_to_gmem,
)
from pallas_kernels.tma_boxes import WARPGROUP_THREADS

# Channels of a CTA: two or one for each thread. Both numbers are guesses: none was measured.
_CHANNELS = (2 * WARPGROUP_THREADS, WARPGROUP_THREADS)


def misfit(
    states: PagedStates,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
) -> str | None:
    """Why the kernel cannot advance these states; None if it can."""
    del x, dt, b, c
    num_groups, state_size, width = a.shape
    fewest = min(_CHANNELS)
    if state_size * fewest > MAX_TILE_NUMBERS:
        return f"a channel must have at most {MAX_TILE_NUMBERS // fewest} numbers, got {state_size}"
    if width % fewest:
        return f"the channels of a group must be a multiple of {fewest}, got {width}"
    num_channels = _channels_per_cta(states, a.shape)
    shape = (num_groups, state_size * width // num_channels, num_channels)
    return state_misfit(states, shape, min_lines=1)


def selective_step_mosaic_gpu(
    states: PagedStates,
    x: jax.Array,  # f[num_reqs, num_groups, width]
    dt: jax.Array,  # f[num_reqs, num_groups, width]
    a: jax.Array,  # f[num_groups, state_size, width]
    b: jax.Array,  # f[num_reqs, num_groups, state_size]
    c: jax.Array,  # f[num_reqs, num_groups, state_size]
    *,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.selective_step`."""
    num_groups, state_size, width = a.shape
    num_channels = _channels_per_cta(states, a.shape)
    num_pieces = width // num_channels
    x, dt, a = (array.reshape(*array.shape[:-1], num_pieces, -1) for array in (x, dt, a))
    pages, out = advance_tiles(
        functools.partial(_step, state_size=state_size),
        states,
        [array.astype(jnp.float32) for array in (x, dt, a, b, c)],
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        # A line of the plan is a piece of a line of the state, with the channels of one CTA.
        plan=StatePlan.of(states, (num_groups, state_size * num_pieces, num_channels)),
        num_heads=num_groups,
        pieces_per_head=num_pieces,
        kernel_name="selective_step",
        interpret=interpret,
    )
    return pages, out.reshape(*out.shape[:2], width)


def _channels_per_cta(states: PagedStates, shape: tuple[int, int, int]) -> int:
    """The most channels that divide `width` and the pages, so that no page boundary cuts a load.

    If none does, the fewest, which `misfit` then rejects.
    """
    _, state_size, width = shape

    def fits(num_channels: int) -> bool:
        lengths = (width, states.numbers_per_page, states.first_number)
        is_whole = all(length % num_channels == 0 for length in lengths)
        return is_whole and state_size * num_channels <= MAX_TILE_NUMBERS

    return next(filter(fits, _CHANNELS), min(_CHANNELS))


def _step(
    cta: Cta,
    x: jax.Ref,  # f32[num_reqs, num_groups, num_pieces, num_channels]
    dt: jax.Ref,  # f32[num_reqs, num_groups, num_pieces, num_channels]
    a: jax.Ref,  # f32[num_groups, state_size, num_pieces, num_channels]
    b: jax.Ref,  # f32[num_reqs, num_groups, state_size]
    c: jax.Ref,  # f32[num_reqs, num_groups, state_size]
    out: jax.Ref,  # f32[num_reqs, num_groups, num_pieces, num_channels]
    *,
    state_size: int,
) -> None:
    req, group, piece = cta.req, cta.head, pl.ds(cta.piece, 1)
    num_pieces, num_channels = x.shape[2:]
    layout = plgpu.Layout.WG_STRIDED((1, num_channels), vec_size=num_channels // WARPGROUP_THREADS)

    def load(ref: jax.Ref) -> jax.Array:  # f32[1, num_channels]
        return plgpu.load(ref, layout=layout, optimized=False)

    @pl.when(cta.is_written)
    def _() -> None:
        tile = Tile(
            cta=cta,
            first_lines=[cta.piece + n * num_pieces for n in range(state_size)],
            lines_per_run=1,
            columns=pl.ds(0, num_channels),
            layout=layout,
        )
        runs = tile.load()
        steps = load(dt.at[req, group, piece])
        inputs = steps * load(x.at[req, group, piece])
        runs = [
            run * jnp.exp(steps * load(a.at[group, n, piece])) + inputs * b[req, group, n]
            for n, run in enumerate(runs)
        ]
        tile.store(runs)
        products = [run * c[req, group, n] for n, run in enumerate(runs)]
        store_to_gmem(out.at[req, group, piece], added(products))

    @pl.when(jnp.logical_not(cta.is_written))
    def _() -> None:
        nothing = plgpu.layout_cast(jnp.zeros((1, num_channels), jnp.float32), layout)
        store_to_gmem(out.at[req, group, piece], nothing)
