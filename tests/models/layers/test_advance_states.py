"""States of requests that have one token each are computed in chunks of rows that have tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import CachePlace, ForwardBatch, KernelSettings, StateInputs, Wants
from models.cache.state_format import StateFormat
from models.forward.layer_context import LayerContext
from models.layers.advance_states import CHUNK_REQS, advance_states

NUM_ROWS = 2 * CHUNK_REQS + 4  # so that the last chunk has rows past the last one
FORMAT = StateFormat(shapes=((3, 2), (5,)), num_windows=1)
PAGE_WORDS = 8  # the window takes a page, and the state another


def make_context(num_used, widths: tuple[int, ...]) -> LayerContext:
    """One layer. Each row reads a slot of its own and writes another."""
    row_idx = jnp.arange(NUM_ROWS + 1, dtype=jnp.int32)
    starts = jnp.minimum(row_idx, num_used)
    slots = 1 + np.random.default_rng(0).permutation(4 * NUM_ROWS).reshape(2, 1, NUM_ROWS, 2)
    states = StateInputs(
        read_slots=jnp.asarray(slots[0], jnp.int32),
        write_slots=jnp.asarray(slots[1], jnp.int32),
        starts_from_zero=row_idx[:-1] % 3 == 1,
        is_alive=row_idx[:-1] % 5 != 3,
        query_start_loc=starts,
        has_one_token_each=True,
    )
    batch = ForwardBatch(
        token_ids=jnp.zeros(NUM_ROWS, jnp.int32),
        positions=10 * row_idx[:-1],
        query_start_loc=starts,
        groups=(states,),
        logits_indices=row_idx[:-1],
        max_query_len=1,
        wants=Wants(logits="last"),
        widths=widths,
    )
    place = CachePlace(format=FORMAT, inputs_idx=0, group_idx=0, row=1)
    context = LayerContext(batch=batch, kernels=KernelSettings(), slots=(None,), cos_sin={})
    return context.at(0, (("own", place),))


@pytest.fixture(scope="module")
def advance_all():
    """(num_used, widths) -> the results and the pages after a step. Jitted for each `widths`."""

    def advance(arrays, states, state, context):
        (x,), (window, numbers) = arrays, states
        counts = jnp.diff(state.query_start_loc)
        seen = window.sum(axis=(1, 2)) + numbers.sum(axis=1) + context.scan_positions + counts
        after = (window + x[:, None, None], 2 * numbers)
        return x * seen, after

    def run(num_used, widths):
        rng = np.random.default_rng(1)
        # Blocks that no request has hold NaN, and so does the null block.
        pages = rng.standard_normal((2, 4 * NUM_ROWS + 2, PAGE_WORDS))
        pages[:, [0, -1]] = np.nan
        x = jnp.asarray(rng.standard_normal(NUM_ROWS), jnp.float32)
        context = make_context(num_used, widths)
        return advance_states(advance, "own", (x,), jnp.asarray(pages, jnp.float32), context)

    return jax.jit(run, static_argnums=1)


@pytest.mark.parametrize("num_used", [0, 1, CHUNK_REQS, 2 * CHUNK_REQS - 3, NUM_ROWS])
def test_chunks_give_the_results_and_pages_of_all_rows_at_once(advance_all, num_used):
    wanted, wanted_pages = advance_all(num_used, ())
    out, pages = advance_all(num_used, (CHUNK_REQS, NUM_ROWS))
    np.testing.assert_array_equal(out[:num_used], wanted[:num_used])
    np.testing.assert_array_equal(pages, wanted_pages)
    assert np.isfinite(out).all()


def test_rows_without_tokens_are_not_computed(advance_all):
    """The result of a chunk without tokens is zero, whatever its rows hold."""
    out, _ = advance_all(CHUNK_REQS - 1, (CHUNK_REQS, NUM_ROWS))
    assert np.all(out[CHUNK_REQS:] == 0)
    at_once, _ = advance_all(CHUNK_REQS - 1, ())
    assert np.all(at_once[CHUNK_REQS:] != 0)
