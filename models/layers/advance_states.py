"""`advance_states`: reads the states of a layer, computes the step, and writes the new states."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from models.cache.format import Pages
from models.forward.forward_batch import ForwardBatch
from models.forward.kernel_settings import BY_DEVICE, PAGES_BY_DEVICE, TOKENS_BY_FEATURE, WHOLE
from models.forward.layer_context import LayerContext, LayerState, Rows
from models.forward.row_widths import Chunk, Width, run_at_width
from pallas_kernels import PagedStates

Arrays = TypeVar("Arrays")
Weights = TypeVar("Weights", bound=tuple[jax.Array | None, ...])

# (arrays of tokens, states before the step, their `LayerState`, context) -> (arrays of tokens,
# states after the step). The first axis of all arrays is the tokens, or the requests of states. If
# the format has a `step_op`, the last state may be a `PagedStates`, before and after the step.
Advance = Callable[
    [tuple[jax.Array, ...], tuple[jax.Array | PagedStates, ...], LayerState, LayerContext],
    tuple[Arrays, tuple[jax.Array | PagedStates, ...]],
]

# The same for a layer whose heads may be split. The first argument is its vectors of weights.
AdvanceHeads = Callable[
    [Weights, tuple[jax.Array, ...], tuple[jax.Array, ...], LayerState, LayerContext],
    tuple[jax.Array, tuple[jax.Array, ...]],
]

# Requests whose states are computed together if each has one token. Measured in docs/design/cpu.md.
CHUNK_REQS = 8
# Other steps with at most this many requests read the states of this many rows, not of all rows.
FEW_REQS = 16


def advance_heads(
    advance: AdvanceHeads[Weights],
    name: str,
    weights: Weights,
    arrays: tuple[jax.Array, ...],  # f[num_tokens, features] each
    pages: Pages,
    context: LayerContext,
    *,
    is_split: bool,
) -> tuple[jax.Array, Pages]:
    """As `advance_states`. If `is_split`, each device of a mesh advances the states of its heads.

    Args:
        advance: As in `advance_states`, with `weights` before its arguments. If `is_split`, its
            arguments and its result, f[num_tokens, features], are those of one device.
        weights: Vectors of the layer: the heads of the first device, then those of the second, and
            so on (`WeightRule.heads`).
        arrays: Their features have the same order.
    """

    if not is_split:
        return advance_states(functools.partial(advance, weights), name, arrays, pages, context)
    own = replace(context.with_reported({}), kernels=context.kernels.on_one_device())

    # The batch is an argument, because JAX cannot gather from arrays of the mesh that a function in
    # `by_device` captures.
    def run(
        weights: Weights, arrays: tuple[jax.Array, ...], pages: Pages, batch: ForwardBatch
    ) -> tuple[jax.Array, Pages]:
        return advance_states(
            *(functools.partial(advance, weights), name, arrays, pages),
            replace(own, batch=batch),
        )

    return context.kernels.by_device(
        *(run, weights, arrays, pages, context.batch),
        in_specs=(BY_DEVICE, TOKENS_BY_FEATURE, PAGES_BY_DEVICE, WHOLE),
        out_specs=(TOKENS_BY_FEATURE, PAGES_BY_DEVICE),
    )


def advance_states(
    advance: Advance[Arrays],
    name: str,
    arrays: tuple[jax.Array, ...],  # [num_tokens, ...] each
    pages: Pages,
    context: LayerContext,
) -> tuple[Arrays, Pages]:
    """Returns the result of `advance` for all tokens, and the pages with the new states.

    If the program serves several widths, the time of a step depends on the number of its requests,
    not on the number of rows of the program. Results of padding are then zero or meaningless.

    Args:
        advance: Must compute each request from its own rows alone. It may be called with fewer rows
            than there are, and with a state and a context for these rows. It must not call
            `LayerContext.report`.
        name: The local name of the layer's cache of states.
    """
    state = context.state(name)
    if context.steps_in_pages(state):
        return _step_in_pages(advance, arrays, pages, state, context)
    num_reqs = state.is_written.shape[0]
    fewest = CHUNK_REQS if state.has_one_token_each else FEW_REQS
    if num_reqs <= fewest or len(context.batch.widths) < 2 or context.rows != Rows():
        return _advance_rows(advance, arrays, pages, state, context)
    advance_used = _advance_chunks if state.has_one_token_each else _advance_leading
    return advance_used(advance, arrays, pages, state, context.with_reported({}))


def _advance_rows(
    advance: Advance[Arrays],
    arrays: tuple[jax.Array, ...],
    pages: Pages,
    state: LayerState,
    context: LayerContext,
) -> tuple[Arrays, Pages]:
    """Advances the states of all rows of `state`."""
    out, after = advance(arrays, context.read_state(state, pages), state, context)
    return out, context.write_state(state, pages, after)


def _step_in_pages(
    advance: Advance[Arrays],
    arrays: tuple[jax.Array, ...],
    pages: Pages,
    state: LayerState,
    context: LayerContext,
) -> tuple[Arrays, Pages]:
    """Advances the states of requests of one token each, where they lie in the pages."""
    windows = replace(state, format=state.format.of_windows())
    own = replace(context.with_reported({}), kernels=context.kernels.on_one_device())

    # All devices of a mesh have whole states, and compute the same.
    def run(arrays: tuple[jax.Array, ...], pages: Pages) -> tuple[Arrays, Pages]:
        before = (*own.read_state(windows, pages), state.format.in_pages(pages, state))
        out, (*after, states) = advance(arrays, before, state, own)
        return out, own.write_state(windows, states.pages, tuple(after))

    return context.kernels.by_device(
        *(run, arrays, pages),
        in_specs=(WHOLE, PAGES_BY_DEVICE),
        out_specs=(WHOLE, PAGES_BY_DEVICE),
    )


def _advance_chunks(
    advance: Advance[Arrays],
    arrays: tuple[jax.Array, ...],
    pages: Pages,
    state: LayerState,
    context: LayerContext,
) -> tuple[Arrays, Pages]:
    """Advances the states of requests of one token each, in chunks of `CHUNK_REQS`.

    The states of a chunk stay in the processor's cache from one op to the next.
    """

    def run_chunk(chunk_idx: jax.Array, carry: tuple[Arrays, Pages]) -> tuple[Arrays, Pages]:
        room, pages = carry
        chunk = Chunk(start=chunk_idx * CHUNK_REQS, size=CHUNK_REQS)
        own = tuple(map(chunk.read, arrays))
        own_state = _of_chunk(state, chunk)

        def run_turn(
            _: jax.Array, carry: tuple[Arrays, tuple[jax.Array, ...]]
        ) -> tuple[Arrays, tuple[jax.Array, ...]]:
            return advance(own, carry[1], own_state, context.of(chunk))

        # XLA would fuse the read, the scan and the write, and compute parts of them several times.
        # It fuses nothing with values that a loop carries. So the scan is in a loop, of which XLA
        # does not know that it has only one turn.
        first = jax.tree.map(lambda x: jnp.zeros((chunk.size, *x.shape[1:]), x.dtype), room)
        num_turns = jnp.minimum(own_state.query_start_loc[-1], 1)
        out, states = jax.lax.fori_loop(
            0, num_turns, run_turn, (first, context.read_state(own_state, pages))
        )
        return jax.tree.map(chunk.write, room, out), context.write_state(own_state, pages, states)

    num_rows = context.num_rows
    room = _zeros_of_result(
        advance, arrays, pages, state, context, num_rows + -num_rows % CHUNK_REQS
    )
    num_chunks = (state.query_start_loc[-1] + CHUNK_REQS - 1) // CHUNK_REQS
    room, pages = jax.lax.fori_loop(0, num_chunks, run_chunk, (room, pages))
    return jax.tree.map(lambda x: x[:num_rows], room), pages


def _advance_leading(
    advance: Advance[Arrays],
    arrays: tuple[jax.Array, ...],
    pages: Pages,
    state: LayerState,
    context: LayerContext,
) -> tuple[Arrays, Pages]:
    """Advances the states of the first `FEW_REQS` rows if no later row has tokens, or of all."""
    num_tokens = context.num_rows

    def run_leading(width: Width, carry: tuple[Arrays, Pages]) -> tuple[Arrays, Pages]:
        _, pages = carry
        own = tuple(map(replace(width, size=num_tokens).read, arrays))
        return _advance_rows(advance, own, pages, _of_leading(state, width), context)

    starts = state.query_start_loc
    num_used = (starts[:-1] < starts[-1]).sum(dtype=jnp.int32)
    room = _zeros_of_result(advance, arrays, pages, state, context, num_tokens)
    widths = (FEW_REQS, state.is_written.shape[0])
    return run_at_width(widths, num_used, run_leading, (room, pages))


def _zeros_of_result(
    advance: Advance[Arrays],
    arrays: tuple[jax.Array, ...],
    pages: Pages,
    state: LayerState,
    context: LayerContext,
    num_rows: int,
) -> Arrays:
    """Zeros of the shapes and dtypes of the result of `advance`, with `num_rows` rows."""
    shapes, _ = jax.eval_shape(
        lambda *inputs: _advance_rows(advance, *inputs, state, context), arrays, pages
    )
    return jax.tree.map(lambda x: jnp.zeros((num_rows, *x.shape[1:]), x.dtype), shapes)


def _of_chunk(state: LayerState, chunk: Chunk) -> LayerState:
    """The state of a chunk of requests of one token each. Rows past the last one write nothing."""
    row_idx = jnp.arange(chunk.size + 1, dtype=jnp.int32)
    return replace(
        _read_rows(state, chunk),
        query_start_loc=jnp.minimum(row_idx, state.query_start_loc[-1] - chunk.start),
    )


def _of_leading(state: LayerState, width: Width) -> LayerState:
    """The state of the first rows. No later row has tokens."""
    ends = state.state_ends
    return replace(
        _read_rows(state, width),
        query_start_loc=replace(width, size=width.size + 1).read(state.query_start_loc),
        state_ends=None if ends is None else width.read(ends),
    )


def _read_rows(state: LayerState, rows: Chunk | Width) -> LayerState:
    return replace(
        state,
        read_slots=rows.read(state.read_slots),
        write_slots=rows.read(state.write_slots),
        starts_from_zero=rows.read(state.starts_from_zero),
        is_written=rows.read(state.is_written),
    )
